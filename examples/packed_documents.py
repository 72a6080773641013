"""Several documents in one row: no query sees a key of another document, and no S x K mask is built."""

import numpy as np

import dsv4cp

lengths = [7, 12, 5]  # tokens of each document; the last 4 places of the row are padding
S, R, WINDOW = 28, 4, 6

segments = np.zeros((1, S), np.int32)  # 0 is padding
positions = np.zeros((1, S), np.int32)
pooled_segments, pooled_positions = [], []
start = 0
for number, length in enumerate(lengths, start=1):
    segments[0, start : start + length] = number
    positions[0, start : start + length] = np.arange(length)
    pooled_segments += [number] * (length // R)  # full groups of R tokens only
    pooled_positions += range(length // R)
    start += length
P = len(pooled_segments)

ids = dsv4cp.build_dsv4_sparse_topk_indices(
    batch_size=1,
    seq_len=S,
    key_len=S + P,
    window_size=WINDOW,
    compress_ratio=R,
    n_pooled=P,
    q_segment_ids=segments,
    q_local_positions=positions,
    pooled_segment_ids=np.array([pooled_segments], np.int32),
    pooled_positions=np.array([pooled_positions], np.int32),
)

of_key = np.concatenate([segments[0], pooled_segments])
for query in range(S):
    seen = ids[0, query][ids[0, query] >= 0]
    if query % 6 == 0:
        print(f"query {query:2} of document {segments[0, query]} sees {seen.tolist()}")
    if segments[0, query] == 0 and len(seen):
        raise SystemExit("a padding query sees something")
    if np.any(of_key[seen] != segments[0, query]):
        raise SystemExit(f"query {query} sees another document")
    if np.any(seen[seen < S] > query):
        raise SystemExit(f"query {query} sees the future")
print(f"{S} queries, {S + P} keys, {ids.shape[-1]} slots each")
