"""Text -> token windows; windows -> what each weight is multiplied with."""
