"""The heart: pixels to tokens and back, one mechanism per file.

| family | group | relate | put back | link it reports |
|---|---|---|---|---|
| VT | filter, recurrent, pooling or cluster tokenizer | transformer on tokens | projector | assignment (B, M, N) |
| PaCa | learned assignment, once a stage | pixels attend to tokens, which puts back too | same step | assignment |
| SViT | super token sampling | self-attention on tokens | the same association | association (B, N, 9) |
| SparseFormer | region, points, samples, adaptive decoding | focusing, then cortex transformer | dense map attends to \
tokens by location | regions (B, M, 4) |
"""
