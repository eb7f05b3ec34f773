"""Speculative decoding: its nouns and its algorithm, without a network.

Two parts. The torch-free part (`candidates`, `digest`, `log`, `commit`, `params`, `seeds`, `messages`, `draft_length`,
`drafter`, `grammar`, `grammars`, `mailbox`, `worker`, `vocabulary`; control: `policy`, `decision`, `observations`,
`estimates`, `rates`, `costs`, `sharing`, `goodput`, `probing`, `goodput_policy`) is all that the scheduler may import.
The tensor part (`noise`, `support`, `sampling`, `law`, `margins`, `accept`, `ratio`, `engine`, `drafters`) needs torch.
This file imports neither.
"""
