"""Loads, stores and the folding of CRC-32 inside kernels, as LLVM code (docs/decisions/0051).

Kernels that touch many arrays take their addresses (``array.ctypes.data``) instead of the arrays: numba passes seven
words and two atomic reference counts per array and call. Nothing here checks bounds: **the caller proves that every
byte lies inside memory that stays allocated during the call.** Offsets are int64 bytes from the address; ``get_`` and
``put_`` take element indices of a native-endian array.
"""

from collections.abc import Callable
from typing import Any

from tiered.kernels.jit import intrinsic

# Folding constants of the reflected IEEE polynomial (Gopal et al., "Fast CRC Computation for Generic
# Polynomials Using PCLMULQDQ", 2009): by 512 bits and by 128 bits.
_FOLD_512 = (0x0154442BD4, 0x01C6E41596)
_FOLD_128 = (0x01751997D0, 0x00CCAA009E)


def _pointer(builder: Any, address: Any, offset: Any, pointee: Any) -> Any:
    return builder.inttoptr(builder.add(address, offset), pointee.as_pointer())


def _element(builder: Any, address: Any, index: Any, bits: int) -> Any:
    from llvmlite import ir

    offset = builder.mul(index, ir.Constant(ir.IntType(64), bits // 8))
    return _pointer(builder, address, offset, ir.IntType(bits))


def _loader(bits: int, *, swap: bool, signed: bool, indexed: bool) -> Callable[..., Any]:
    """What numba needs to compile a load of ``bits`` bits from memory: ``swap`` reverses the bytes (big-endian),
    ``signed`` extends the sign; ``indexed``: the second argument is the number of an element, else a byte offset."""

    def load(_typing_context: Any, _address: Any, _offset: Any) -> Any:
        """The types of the load and what generates its code, as numba's ``intrinsic`` wants them."""
        from llvmlite import ir
        from numba.core import types

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            """Emit LLVM code of the load; the result is widened to 64 bits."""
            if indexed:
                word = builder.load(_element(builder, args[0], args[1], bits), align=1)
            else:
                word = builder.load(_pointer(builder, args[0], args[1], ir.IntType(bits)), align=1)
            if swap:
                word = builder.bswap(word)
            if bits == 64:
                return word
            return (builder.sext if signed else builder.zext)(word, ir.IntType(64))

        result = types.int64 if signed or bits == 8 else types.uint64  # a byte fits either way
        return result(types.int64, types.int64), codegen

    return load


def _storer(bits: int) -> Callable[..., Any]:
    """What numba needs to compile a store of the lowest ``bits`` bits of a value as one element of an array."""

    def store(_typing_context: Any, _address: Any, _index: Any, value: Any) -> Any:
        """The types of the store and what generates its code, as numba's ``intrinsic`` wants them."""
        from llvmlite import ir
        from numba.core import types

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            """Emit LLVM code of the store."""
            word = args[2] if bits == 64 else builder.trunc(args[2], ir.IntType(bits))
            builder.store(word, _element(builder, args[0], args[1], bits), align=1)
            return context.get_dummy_value()

        wide = types.uint64 if value == types.uint64 else types.int64
        return types.void(types.int64, types.int64, wide), codegen

    return store


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    return intrinsic(function)


def _load(name: str, bits: int, *, swap: bool, signed: bool) -> Callable[..., Any]:
    return _named(name, _loader(bits, swap=swap, signed=signed, indexed=False))


def _get(name: str, bits: int, *, signed: bool) -> Callable[..., Any]:
    return _named(name, _loader(bits, swap=False, signed=signed, indexed=True))


# load_x(address, offset_bytes): le ones give uint64, all others int64.
load_u8 = _load("load_u8", 8, swap=False, signed=False)
load_i8 = _load("load_i8", 8, swap=False, signed=True)
load_be16 = _load("load_be16", 16, swap=True, signed=True)
load_be32 = _load("load_be32", 32, swap=True, signed=True)
load_be64 = _load("load_be64", 64, swap=True, signed=True)
load_le32 = _load("load_le32", 32, swap=False, signed=False)
load_le64 = _load("load_le64", 64, swap=False, signed=False)

# get_x(address, index), put_x(address, index, value): elements of an array; all but u64 are int64 here.
get_i32 = _get("get_i32", 32, signed=True)
get_i64 = _get("get_i64", 64, signed=True)
get_u64 = _get("get_u64", 64, signed=False)
put_u8 = _named("put_u8", _storer(8))
put_u16 = _named("put_u16", _storer(16))
put_i32 = _named("put_i32", _storer(32))
put_i64 = _named("put_i64", _storer(64))


@intrinsic
def copy_bytes(_typing_context: Any, _source: Any, _offset: Any, _target: Any, _at: Any, _length: Any) -> Any:
    """``copy_bytes(source, offset, target, target_offset, length)`` in a kernel copies bytes between two addresses, as
    memcpy. Returns the types and the code generator, as numba's ``intrinsic`` wants them."""
    from numba.core import cgutils, types

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        """Emit LLVM code of the copy."""
        source, offset, target, at, length = args
        byte = cgutils.int8_t
        cgutils.raw_memcpy(
            builder, _pointer(builder, target, at, byte), _pointer(builder, source, offset, byte), length, 1
        )
        return context.get_dummy_value()

    words = [types.int64] * 5
    return types.void(*words), codegen


@intrinsic
def write_at(_typing_context: Any, _file: Any, _address: Any, _length: Any, _offset: Any) -> Any:
    """``write_at(descriptor, address, length, file_offset)`` in a kernel calls pwrite(2), and gives the number of bytes
    written or -1. Returns the types and the code generator, as numba's ``intrinsic`` wants them."""
    from llvmlite import ir
    from numba.core import cgutils, types

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        """The call of pwrite, without the interpreter."""
        file, address, length, offset = args
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [ir.IntType(32), cgutils.voidptr_t, word, word])
        pwrite = cgutils.get_or_insert_function(builder.module, kind, "pwrite")
        descriptor = builder.trunc(file, ir.IntType(32))
        return builder.call(
            pwrite, [descriptor, builder.inttoptr(address, cgutils.voidptr_t), length, offset]
        )

    return types.int64(*[types.int64] * 4), codegen


def _can_fold(context: Any) -> bool:
    triple, _, features = context.codegen().magic_tuple()
    return triple.startswith("x86_64") and "+pclmul" in features.split(",")


@intrinsic
def can_fold_crc32(_typing_context: Any) -> Any:
    """``can_fold_crc32()`` in a kernel is whether ``fold_crc32`` works: code is made for an x86 processor that has the
    instruction PCLMULQDQ. Returns the type and the code generator, as numba's ``intrinsic`` wants them."""
    from llvmlite import ir
    from numba.core import types

    def codegen(context: Any, _builder: Any, _signature: Any, _args: Any) -> Any:
        """A constant, so that the compiler drops the branch that is not taken."""
        return ir.Constant(ir.IntType(1), int(_can_fold(context)))

    return types.boolean(), codegen


@intrinsic
def fold_crc32(_typing_context: Any, _address: Any, _offset: Any, _blocks: Any, _register: Any) -> Any:
    """``fold_crc32(address, offset, blocks, register)`` in a kernel gives two uint64: 16 bytes that have, from a CRC-32
    register of 0, the same register after them as ``blocks`` >= 1 blocks of 64 bytes from ``register`` on. Only where
    ``can_fold_crc32()``. Returns the types and the code generator, as numba's ``intrinsic`` wants them.
    """
    from llvmlite import ir
    from numba.core import types

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        """Emit LLVM code of the folding; for other processors zeros, which nothing uses."""
        if not _can_fold(context):
            zero = ir.Constant(ir.IntType(64), 0)
            return context.make_tuple(builder, signature.return_type, [zero, zero])
        return context.make_tuple(builder, signature.return_type, _emit_fold(builder, args))

    pair: Any = types.UniTuple(types.uint64, 2)  # type: ignore[attr-defined]
    return pair(types.int64, types.int64, types.int64, types.uint64), codegen


def _emit_fold(builder: Any, args: Any) -> list[Any]:
    """Emit LLVM code that folds a CRC-32 over blocks of 64 bytes, as in the paper of Gopal et al. (2009): four sums of
    128 bits are carried over the blocks, each multiplied by constants without carries, and then folded into one.
    ``args``: address, offset, number of blocks, register. Returns the two halves of the result."""
    from llvmlite import ir

    address, offset, blocks, register = args
    i64, i32 = ir.IntType(64), ir.IntType(32)
    lanes = ir.VectorType(i64, 2)
    clmul = builder.module.declare_intrinsic(
        "llvm.x86.pclmulqdq", (), ir.FunctionType(lanes, [lanes, lanes, ir.IntType(8)])
    )

    def fold(value: Any, factors: tuple[int, int], following: Any) -> Any:
        """``value`` moved over as many bytes as ``factors`` are for, added to ``following``."""
        factor = ir.Constant(lanes, [ir.Constant(i64, word) for word in factors])
        low = builder.call(clmul, [value, factor, ir.Constant(ir.IntType(8), 0x00)])
        high = builder.call(clmul, [value, factor, ir.Constant(ir.IntType(8), 0x11)])
        return builder.xor(builder.xor(low, high), following)

    def load(begin: Any, lane: int) -> Any:
        return builder.load(_pointer(builder, begin, ir.Constant(i64, 16 * lane), lanes), align=1)

    start = builder.add(address, offset)
    first = [load(start, lane) for lane in range(4)]
    seed = builder.insert_element(
        ir.Constant(lanes, [ir.Constant(i64, 0)] * 2), register, ir.Constant(i32, 0)
    )
    first[0] = builder.xor(first[0], seed)
    entry = builder.block
    head, body, done = (builder.append_basic_block(f"fold.{name}") for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(i64)
    sums = [builder.phi(lanes) for _ in range(4)]
    builder.cbranch(builder.icmp_signed("<", index, blocks), body, done)
    builder.position_at_end(body)
    here = builder.add(start, builder.mul(index, ir.Constant(i64, 64)))
    folded = [fold(sums[lane], _FOLD_512, load(here, lane)) for lane in range(4)]
    following = builder.add(index, ir.Constant(i64, 1))
    builder.branch(head)
    for phi, begin, again in zip(
        [index, *sums], [ir.Constant(i64, 1), *first], [following, *folded], strict=True
    ):
        phi.add_incoming(begin, entry)
        phi.add_incoming(again, body)
    builder.position_at_end(done)
    total = sums[0]
    for lane in range(1, 4):
        total = fold(total, _FOLD_128, sums[lane])
    return [builder.extract_element(total, ir.Constant(i32, lane)) for lane in range(2)]
