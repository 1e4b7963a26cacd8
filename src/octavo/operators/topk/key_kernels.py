"""Order-preserving integer keys and in-register sorting, shared by the TopK kernels.

A key is an integer that orders exactly as ``torch.topk`` orders values: NaN above everything whatever its sign,
``-0 == +0``, and, where the column is part of the key, the lower column first among equals. Three kinds are used:

* ``value_key``: int32, from the value alone;
* ``packed32``: int32, the value of a 16-bit dtype above 16 bits of inverted column (rows shorter than 65536);
* ``packed64``: int64, an int32 key above 31 bits of inverted column.

Selecting the smallest inverts the value key, so that every kernel takes the largest.
"""

import triton
import triton.language as tl

LOWEST32 = tl.constexpr(-(2**31))
LOWEST64 = tl.constexpr(-(2**63))
# Above +inf (0x7F800000); one below the int32 maximum so that no inverted key reaches LOWEST32, which is padding.
NAN_KEY = tl.constexpr(0x7FFFFFFE)
COLUMN_MASK = tl.constexpr(2**31 - 1)


@triton.jit
def value_key(x, LARGEST: tl.constexpr):
    """int32 key of float32, bfloat16 or float16 values (any shape); the larger key comes first in the result."""
    f = x.to(tl.float32)
    # Adding +0 turns -0 into +0 and nothing else: the two must tie.
    bits = (f + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(f != f, NAN_KEY, bits)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if not LARGEST:
        key = ~key
    return key


@triton.jit
def value_key16(x, LARGEST: tl.constexpr):
    """Key of bfloat16 or float16 values in [-32768, 32767], as int32."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    infinity: tl.constexpr = 0x7F80 if x.dtype == tl.bfloat16 else 0x7C00
    bits = tl.where((bits & 0x7FFF) > infinity, 0x7FFF, bits)
    bits = tl.where(bits == -32768, 0, bits)
    key = bits ^ ((bits >> 15) & 0x7FFF)
    if not LARGEST:
        key = ~key
    return key


@triton.jit
def packed32(x, cols, LARGEST: tl.constexpr):
    """Unique int32 keys of a 16-bit dtype; ``cols`` below 65535."""
    return (value_key16(x, LARGEST) << 16) | (0xFFFF - cols)


@triton.jit
def packed64(key, cols):
    """Unique int64 keys: int32 ``key`` above the inverted column."""
    return (key.to(tl.int64) << 32) | (cols ^ COLUMN_MASK).to(tl.int64)


@triton.jit
def load_wires(
    x_ptr,
    row_offsets,
    row_mask,
    n,
    stride_col,
    start,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    COUNT: tl.constexpr,
    LARGEST: tl.constexpr,
    KIND: tl.constexpr,
):
    """``COUNT`` key tensors [ROWS, LANES], one element a thread, of the columns from ``start`` on.

    KIND: "value" (int32), "packed32" or "packed64". Columns past ``n`` and rows past the mask get the lowest key.
    ``VEC`` neighbouring columns are loaded together by one thread and go to neighbouring wires.
    """
    rows: tl.constexpr = row_offsets.shape[0]
    out = ()
    for j in tl.static_range(COUNT // VEC):
        lane = tl.arange(0, LANES)[None, :, None] * VEC + tl.arange(0, VEC)[None, None, :]
        cols = start + j * LANES * VEC + lane
        mask = row_mask[:, None, None] & (cols < n)
        offsets = row_offsets[:, None, None] + cols.to(tl.int64) * stride_col
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
        if KIND == "packed32":
            key = tl.where(mask, packed32(x, cols, LARGEST), LOWEST32)
        elif KIND == "value":
            key = tl.where(mask, value_key(x, LARGEST), LOWEST32)
        else:
            key = tl.where(mask, packed64(value_key(x, LARGEST), cols), LOWEST64)
        if VEC == 1:
            out = out + (tl.reshape(key, [rows, LANES]),)
        elif VEC == 2:
            a, b = tl.split(key)
            out = out + (a, b)
        else:
            even, odd = tl.split(tl.reshape(key, [rows, LANES, 2, 2]))
            a, c = tl.split(even)
            b, d = tl.split(odd)
            out = out + (a, b, c, d)
    return out


@triton.jit
def column_of32(packed):
    return 0xFFFF - (packed & 0xFFFF)


@triton.jit
def column_of64(packed):
    return ((packed & COLUMN_MASK) ^ COLUMN_MASK).to(tl.int32)


@triton.jit
def popcount(x):
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF


@triton.jit
def lowest_bit_index(x):
    """Index of the lowest set bit of a non-zero int32: the exponent of that bit as a float."""
    low = (x & -x).to(tl.uint32, bitcast=True).to(tl.float32)
    return (low.to(tl.int32, bitcast=True) >> 23) - 127


@triton.constexpr_function
def sorting_network(n):
    """Batcher's odd-even merge sort of ``n`` (a power of two) wires, as a flat tuple of wire pairs."""
    pairs = []
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs += [i + j, i + j + k]
            k //= 2
        p *= 2
    return tuple(pairs)


@triton.constexpr_function
def bitonic_network(n):
    """The merge of a bitonic sequence of ``n`` wires, as a flat tuple of wire pairs."""
    pairs = []
    k = n // 2
    while k >= 1:
        for i in range(n):
            if i & k == 0:
                pairs += [i, i | k]
        k //= 2
    return tuple(pairs)


@triton.jit
def _exchange(wires, i: tl.constexpr, j: tl.constexpr):
    a = wires[i]
    b = wires[j]
    high = tl.maximum(a, b)
    if high.dtype == tl.int64:
        # One 64-bit comparison instead of the two of a min beside a max.
        low = a ^ b ^ high
    else:
        low = tl.minimum(a, b)
    out = ()
    for q in tl.static_range(len(wires)):
        if q == i:
            out = out + (high,)
        elif q == j:
            out = out + (low,)
        else:
            out = out + (wires[q],)
    return out


@triton.jit
def run_network(wires, network: tl.constexpr):
    """Apply compare-exchanges to a tuple of equal-shaped tensors, the larger to the lower wire."""
    for q in tl.static_range(len(network) // 2):
        wires = _exchange(wires, network[2 * q], network[2 * q + 1])
    return wires


@triton.jit
def sort_wires(wires):
    """Sort a power-of-two tuple of tensors elementwise, descending."""
    return run_network(wires, sorting_network(len(wires)))


@triton.jit
def merge_wires(a, b):
    """The ``len(a)`` largest of two descending tuples of equal length, descending."""
    kept = ()
    for q in tl.static_range(len(a)):
        kept = kept + (tl.maximum(a[q], b[len(a) - 1 - q]),)
    return run_network(kept, bitonic_network(len(a)))
