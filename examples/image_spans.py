"""Image tokens see their whole image, both ways; text tokens keep the causal window."""

import numpy as np

import dsv4cp

TEXT, START, INSIDE, END = -1, 0, 1, 4
types = np.array([[TEXT] * 4 + [START] + [INSIDE] * 5 + [END] + [TEXT] * 5])
S, WINDOW, LONGEST = types.shape[1], 4, 8

ids = dsv4cp.build_dsv4_sparse_topk_indices(
    batch_size=1, seq_len=S, key_len=S, window_size=WINDOW, vision_token_types=types, max_image_tokens=LONGEST
)

image = set(range(4, 11))
for query in range(S):
    seen = {int(k) for k in ids[0, query] if k >= 0}
    kind = {TEXT: "text", START: "start", INSIDE: "image", END: "end"}[int(types[0, query])]
    print(f"query {query:2} {kind:5} sees {min(seen):2} .. {max(seen):2}")
    window = set(range(max(query - WINDOW + 1, 0), query + 1))
    expected = window | image if query in image else window
    if seen != expected:
        raise SystemExit(f"query {query} sees {sorted(seen)}, expected {sorted(expected)}")
