"""All that is known of transformers: models as they come, what a forward pass shows of them, and their weights.

Where a model comes from: `source` and `context`, how many positions it has; of a GGUF file, `gguf` describes it, by its
`gguf_header`, by the `gguf_weights` that its tensors make, and `gguf_values` reads them.
Without weights: `weightless` builds it, `structure` reads off it, `naming` and `locations` say where a checkpoint's
tensors go, `phantom` lets it run all the same.
What a pass shows: `watch` sees the products, `flow` what becomes of their outputs, `recorder` notes both, `products`
puts them under the checkpoint's names, `probe` is all of that at once; `experts` is what is special about mixtures.
With weights: `stream` has those of a part in memory, `stand_ins` run a model without its blocks.
Under all of them is `library`, the calls to transformers.
"""
