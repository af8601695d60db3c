"""The machine that runs compiled kernels without a GPU: PTX written by hand, beside NumPy and torch."""

import numpy as np
import pytest
import torch

from tests import ptx

THREADS = 64


def run(body, *tensors, grid=(1, 1, 1), shared=0):
    """Run instructions in which `%rd0`, `%rd1`, ... are addresses of tensors, and `%r0` is the thread."""
    params = ", ".join(f".param .u64 t{i}" for i in range(len(tensors)))
    loads = "".join(f"ld.param.b64 %rd{i}, [t{i}];\n" for i in range(len(tensors)))
    lines = f"mov.u32 %r0, %tid.x;\n{loads}{body}\nret;"
    text = f".visible .entry kernel({params})\n.reqntid {THREADS}\n{{\n{lines}\n}}\n"
    ptx.run(text, grid, [t.data_ptr() for t in tensors], shared)


# %rd8 and %rd9: the places of a thread in two tensors of 4 bytes each
PLACES = "mad.wide.u32 %rd8, %r0, 4, %rd0;\nmad.wide.u32 %rd9, %r0, 4, %rd1;\n"


def computed(instruction, *inputs, dtype=torch.float32):
    """What an instruction from `%r1`, `%r2`, ... to `%r9` gives for these numbers."""
    packed, out = torch.cat(inputs), torch.empty(THREADS, dtype=dtype)
    loads = "".join(
        f"ld.global.b32 {{ %r{i + 1} }}, [ %rd8 + {4 * THREADS * i} ];\n" for i in range(len(inputs))
    )
    run(f"{PLACES}{loads}{instruction}\nst.global.b32 [ %rd9 + 0 ], {{ %r9 }};", packed, out)
    return out


def floats(seed):
    """Random numbers of all sizes, and some that are special."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (THREADS,), generator=generator).int()
    x = bits.view(torch.float32)
    x[:8] = torch.tensor([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, 1.0])[
        torch.randperm(8, generator=generator)
    ]
    return x


def test_an_fma_rounds_once():
    for seed in range(10):
        a, b = torch.randn(THREADS), torch.randn(THREADS)
        # near the product, so that much cancels; its error is then all there is
        c = -(a * b) * (1 + torch.randint(-3, 4, (THREADS,)) * 2.0**-23 * (seed % 3))
        found = computed("fma.rn.f32 %r9, %r1, %r2, %r3;", a, b, c)
        # 64 bits hold the product, and 80 the sum
        exact = a.numpy().astype(np.longdouble) * b.numpy() + c.numpy()
        assert (found.numpy() == exact.astype(np.float32)).all()


@pytest.mark.parametrize("seed", range(5))
def test_floats_are_narrowed_as_torch_does(seed):
    x, y = floats(seed), floats(seed + 100)
    pairs = torch.stack([y, x], 1)
    for name, dtype in (("bf16x2", torch.bfloat16), ("f16x2", torch.float16)):
        found = computed(f"cvt.rn.{name}.f32 %r9, %r1, %r2;", x, y, dtype=torch.int32)
        found, expected = found.view(dtype).view(THREADS, 2), pairs.to(dtype)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


def test_what_is_not_a_number_has_the_bits_of_the_hardware():
    nan = torch.full((THREADS,), -1, dtype=torch.int32).view(torch.float32)
    found = computed("add.f32 %r9, %r1, 0f80000000;", nan, dtype=torch.int32)
    assert (found == 0x7FFFFFFF).all()


def test_bits_are_what_plain_python_says():
    a, b, c = (floats(seed).view(torch.int32) for seed in (1, 2, 3))
    unsigned = lambda t: [int(x) & 0xFFFFFFFF for x in t]
    found = computed("lop3.b32 %r9, %r1, %r2, %r3, 0xE8;", a, b, c, dtype=torch.int32)
    triples = [*zip(unsigned(a), unsigned(b), unsigned(c), strict=True)]
    assert unsigned(found) == [x & y | x & z | y & z for x, y, z in triples]
    found = computed("prmt.b32 %r9, %r1, %r2, 0xF614;", a, b, dtype=torch.int32)
    for (x, y, _), word in zip(triples, unsigned(found), strict=True):
        given = [*x.to_bytes(4, "little"), *y.to_bytes(4, "little")]
        sign = 255 if given[7] > 127 else 0
        assert [*word.to_bytes(4, "little")] == [given[4], given[1], given[6], sign]
    found = computed("mul.hi.u32 %r9, %r1, %r2;", a, b, dtype=torch.int32)
    assert unsigned(found) == [x * y >> 32 for x, y, _ in triples]
    found = computed("shf.l.wrap.b32 %r9, %r1, %r2, 9;", a, b, dtype=torch.int32)
    assert unsigned(found) == [(y << 32 | x) << 9 >> 32 & 0xFFFFFFFF for x, y, _ in triples]


def test_ways_part_and_meet():
    """Thread i goes round a loop i times, in which odd threads take another way; then all add up their sums."""
    out = torch.empty(2 * THREADS, dtype=torch.int32)
    body = """
mad.wide.u32 %rd8, %r0, 4, %rd0;
mov.u32 %r1, 0;
mov.u32 %r2, 0;
and.b32 %r3, %r0, 1;
setp.eq.b32 %p1, %r3, 1;
$L__loop:
setp.ge.s32 %p2, %r1, %r0;
@%p2 bra $L__end;
add.s32 %r1, %r1, 1;
@%p1 bra $L__odd;
add.s32 %r2, %r2, 10;
bra.uni $L__loop;
$L__odd:
add.s32 %r2, %r2, 1;
bra.uni $L__loop;
$L__end:
bar.sync 0;
shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;
mov.u32 %r5, %ctaid.x;
mul.wide.u32 %rd7, %r5, 256;
add.s64 %rd8, %rd8, %rd7;
@!%p1 st.global.b32 [ %rd8 + 0 ], { %r2 };
@%p1 st.global.b32 [ %rd8 + 0 ], { %r4 };"""
    run(body, out, grid=(2, 1, 1))
    expected = [10 * (i // 2 * 2) for i in range(THREADS)]
    assert out.tolist() == 2 * expected


def test_shared_memory_is_that_of_a_program():
    out = torch.empty(2 * THREADS, dtype=torch.int32)
    body = """
mov.u32 %r1, %ctaid.x;
mad.lo.s32 %r2, %r1, 64, %r0;
mov.b32 %r3, global_smem;
mad.lo.s32 %r4, %r0, 4, %r3;
st.shared.b32 [ %r4 + 0 ], %r2;
bar.sync 0;
xor.b32 %r5, %r4, 252;
ld.shared.b32 %r6, [ %r5 + 0 ];
mad.wide.u32 %rd1, %r2, 4, %rd0;
st.global.b32 [ %rd1 + 0 ], { %r6 };"""
    run(body, out, grid=(2, 1, 1), shared=4 * THREADS)
    assert out.tolist() == [*reversed(range(64)), *reversed(range(64, 128))]


def test_an_address_in_no_tensor_is_an_error():
    x = torch.zeros(THREADS - 1)
    with pytest.raises(AssertionError, match="1 addresses are in no tensor"):
        run("mad.wide.u32 %rd8, %r0, 4, %rd0;\nld.global.b32 { %r1 }, [ %rd8 + 0 ];", x)


def test_a_misaligned_address_is_an_error():
    x = torch.zeros(THREADS + 4)
    with pytest.raises(AssertionError, match="misaligned"):
        run("mad.wide.u32 %rd8, %r0, 4, %rd0;\nld.global.v2.b32 { %r1, %r2 }, [ %rd8 + 0 ];", x)


def test_a_barrier_that_some_threads_do_not_reach_is_an_error():
    body = "setp.lt.s32 %p1, %r0, 32;\n@%p1 bar.sync 0;"
    with pytest.raises(AssertionError, match="not all threads"):
        run(body, torch.zeros(1))
    run("bar.sync 0;", torch.zeros(1))


def test_a_register_that_was_not_written_is_not_a_number():
    assert computed("add.f32 %r9, %r1, %r7;", torch.ones(THREADS)).isnan().all()
