// Decoded blocks of Blosc chunks into the output, their bytes and bits back in the order they had before the shuffle.
//
// Sources: c-blosc's README_CHUNK_FORMAT.rst; for the bit shuffle, what c-blosc 1.21 writes.
#include "blosc.cuh"

// A decoded block before the shuffle is undone: `typesize` planes of `n_elements` bytes, then the bytes left over.
struct ShuffledBlock {
    Bytes bytes;
    i64 plane_stride, n_elements;
    i32 typesize;

    XGZ_FN u8 byte_at(i64 element, i32 plane) const { return bytes.load(plane * plane_stride + element); }
};

// `Word` holds neighbouring bytes of one plane, little-endian.
template <class Word>
XGZ_FN Word load_word(Bytes bytes, i64 at) {
    if ((address_of(bytes.data + at) & (sizeof(Word) - 1)) == 0) return load_unit<Word>(bytes, at);
    Word word = 0;
#pragma unroll 1
    for (u32 i = 0; i < sizeof(Word); ++i) word |= static_cast<Word>(static_cast<Word>(bytes.load(at + i)) << (8 * i));
    return word;
}

// 16 neighbouring bytes of the output, at any alignment.
XGZ_FN void store_16_bytes(MutableBytes out, i64 at, u128 value) {
    const u64 address = address_of(out.data + at);
    if ((address & 15) == 0) {
        store_unit<u128>(out, at, value);
    } else if ((address & 3) == 0) {
        store_unit<u32>(out, at, static_cast<u32>(value.low));
        store_unit<u32>(out, at + 4, static_cast<u32>(value.low >> 32));
        store_unit<u32>(out, at + 8, static_cast<u32>(value.high));
        store_unit<u32>(out, at + 12, static_cast<u32>(value.high >> 32));
    } else {
#pragma unroll 1
        for (i32 i = 0; i < 16; ++i)
            out.store(at + i, static_cast<u8>((i < 8 ? value.low : value.high) >> (8 * (i & 7))));
    }
}

XGZ_FN void put_byte(u128* value, i32 at, u64 byte) {
    if (at < 8) {
        value->low |= byte << (8 * at);
    } else {
        value->high |= byte << (8 * (at - 8));
    }
}

// Output bytes from `from` on, one by one: what the wide paths leave, and element sizes they do not know.
XGZ_FN void unshuffle_rest(const ShuffledBlock& block, MutableBytes out, i64 from, i64 first, i64 stride) {
    const i64 shuffled_nbytes = block.n_elements * block.typesize;
    for (i64 p = from + first; p < out.size; p += stride) {
        const u32 element = static_cast<u32>(p) / static_cast<u32>(block.typesize);
        const i32 plane = static_cast<i32>(static_cast<u32>(p) - element * static_cast<u32>(block.typesize));
        out.store(p, p < shuffled_nbytes ? block.byte_at(element, plane) : block.bytes.load(p));
    }
}

// Byte shuffle: 16 / typesize neighbouring bytes of every plane make 16 neighbouring bytes of the output.
template <i32 TYPESIZE, class Word>
XGZ_FN void unshuffle_bytes(const ShuffledBlock& block, MutableBytes out, i64 first, i64 stride) {
    const i32 elements = 16 / TYPESIZE;
    const i64 n_units = block.n_elements / elements;
    for (i64 unit = first; unit < n_units; unit += stride) {
        u128 value{0, 0};
#pragma unroll
        for (i32 plane = 0; plane < TYPESIZE; ++plane) {
            const Word word = load_word<Word>(block.bytes, plane * block.plane_stride + unit * elements);
#pragma unroll
            for (i32 e = 0; e < elements; ++e) {
                put_byte(&value, e * TYPESIZE + plane, static_cast<u64>(word >> (8 * e)) & 0xFF);
            }
        }
        store_16_bytes(out, 16 * unit, value);
    }
    unshuffle_rest(block, out, 16 * n_units, first, stride);
}

// Transposes an 8 x 8 matrix of bits, byte i its row i (Warren, Hacker's Delight, section 7-3).
XGZ_FN u64 transpose_bits(u64 x) {
    u64 t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAull;
    x ^= t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCull;
    x ^= t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0ull;
    return x ^ t ^ (t << 28);
}

// The bytes of eight neighbouring elements at byte `plane` of them. A plane of the bit shuffle is eight rows of bits,
// the lowest first; a byte of a row holds one bit of eight elements, the first lowest.
XGZ_FN u64 load_bits(const ShuffledBlock& block, i32 plane, i64 column) {
    const i64 row_nbytes = block.n_elements / 8;
    u64 rows = 0;
#pragma unroll
    for (i32 bit = 0; bit < 8; ++bit) {
        rows |= static_cast<u64>(block.byte_at(bit * row_nbytes + column, plane)) << (8 * bit);
    }
    return transpose_bits(rows);
}

// Bit shuffle of a fixed element size: a thread makes eight neighbouring elements, 16 bytes at a time.
template <i32 TYPESIZE>
XGZ_FN void unshuffle_bits(const ShuffledBlock& block, MutableBytes out, i64 first, i64 stride) {
    const i32 elements = 16 / TYPESIZE < 8 ? 16 / TYPESIZE : 8;  // that fill 16 bytes
    for (i64 column = first; column < block.n_elements / 8; column += stride) {
        u64 planes[TYPESIZE];
#pragma unroll
        for (i32 plane = 0; plane < TYPESIZE; ++plane) planes[plane] = load_bits(block, plane, column);
#pragma unroll
        for (i32 start = 0; start < 8; start += elements) {
            u128 value{0, 0};
#pragma unroll
            for (i32 e = 0; e < elements; ++e) {
#pragma unroll
                for (i32 plane = 0; plane < TYPESIZE; ++plane) {
                    put_byte(&value, e * TYPESIZE + plane, planes[plane] >> (8 * (start + e)) & 0xFF);
                }
            }
            store_16_bytes(out, (8 * column + start) * TYPESIZE, value);
        }
    }
}

// Bit shuffle of any element size: a thread makes one byte of eight neighbouring elements.
XGZ_FN void unshuffle_bits_of_any(const ShuffledBlock& block, MutableBytes out, i64 first, i64 stride) {
    const i64 n_columns = block.n_elements / 8;
    for (i64 i = first; i < n_columns * block.typesize; i += stride) {
        const i32 plane = static_cast<i32>(i / n_columns);
        const i64 column = i - plane * n_columns;
        const u64 bytes = load_bits(block, plane, column);
        for (i32 e = 0; e < 8; ++e) {
            out.store((8 * column + e) * block.typesize + plane, static_cast<u8>(bytes >> (8 * e)));
        }
    }
}

XGZ_FN void unshuffle_block(const ShuffledBlock& block, i64 flags, MutableBytes out, i64 first, i64 stride) {
    const bool by_bytes = (flags & FLAG_SHUFFLE) && block.typesize > 1;
    // c-blosc leaves a block as it is unless eight divides its elements.
    const bool by_bits = !by_bytes && (flags & FLAG_BITSHUFFLE) && block.n_elements > 0 && block.n_elements % 8 == 0;
    if (by_bytes) {
        switch (block.typesize) {
            case 2: return unshuffle_bytes<2, u64>(block, out, first, stride);
            case 4: return unshuffle_bytes<4, u32>(block, out, first, stride);
            case 8: return unshuffle_bytes<8, u16>(block, out, first, stride);
            case 16: return unshuffle_bytes<16, u8>(block, out, first, stride);
            default: return unshuffle_rest(block, out, 0, first, stride);
        }
    }
    if (!by_bits) {
        // Planes apart only where the block was split; they follow each other in the output.
        const i64 n_planes = block.plane_stride == block.n_elements ? 1 : block.typesize;
        const i64 plane_nbytes = out.size / n_planes;
        for (i64 plane = 0; plane < n_planes; ++plane) {
            copy_run(block.bytes.part(plane * block.plane_stride, plane_nbytes),
                     out.part(plane * plane_nbytes, plane_nbytes), first, stride);
        }
        return;
    }
    switch (block.typesize) {
        case 2: unshuffle_bits<2>(block, out, first, stride); break;
        case 4: unshuffle_bits<4>(block, out, first, stride); break;
        case 8: unshuffle_bits<8>(block, out, first, stride); break;
        default: unshuffle_bits_of_any(block, out, first, stride);
    }
    const i64 done = block.n_elements * block.typesize;
    for (i64 p = done + first; p < out.size; p += stride) out.store(p, block.bytes.load(p));
}

// Puts every chunk in its place: undoes the shuffle of its blocks, or copies what is not shuffled. `tiles` blocks of
// threads a chunk. Chunk c goes to out_offset[c]. Chunks with a problem are
// left out.
extern "C" __global__ void __launch_bounds__(256, 3)
    unshuffle_chunks(const u8* encoded, i64 encoded_nbytes, const i64* offset, const u8* scratch, i64 scratch_nbytes,
                     const i64* headers, i64 n_chunks, u8* out, i64 out_nbytes, const i64* out_offset, i64 chunk_nbytes,
                     i64 tiles, const i32* problem, i32* status) {
    const Column rows{headers, N_HEADER_ROWS * n_chunks};
    const i64 tile_nbytes = 32 * 1024;
    for (i64 work = blockIdx.x; work < n_chunks * tiles; work += gridDim.x) {
        const i64 c = work / tiles, tile = work - c * tiles;
        if (Span<const i32>{problem, n_chunks}.load(c) != PROBLEM_NONE) continue;
        const i64 to = Column{out_offset, n_chunks}.load(c);
        const MutableBytes dest = MutableBytes{out, out_nbytes}.part(to, chunk_nbytes);
        if (dest.size != chunk_nbytes) {
            report({status, 1}, 1);
            continue;
        }
        const i64 flags = rows.load(ROW_FLAGS * n_chunks + c);
        if (flags & FLAG_MEMCPYED) {
            const Bytes plain =
                Bytes{encoded, encoded_nbytes}.part(Column{offset, n_chunks}.load(c) + HEADER_NBYTES, chunk_nbytes);
            copy_run(plain, plain.size == dest.size ? dest : dest.part(0, 0), tile * blockDim.x + threadIdx.x,
                     tiles * blockDim.x);
            continue;
        }
        const Header header{chunk_nbytes,
                            rows.load(ROW_BLOCKSIZE * n_chunks + c),
                            0,
                            2,
                            1,
                            static_cast<i32>(flags),
                            static_cast<i32>(rows.load(ROW_TYPESIZE * n_chunks + c))};
        const Bytes chunk_scratch =
            Bytes{scratch, scratch_nbytes}.part(rows.load(ROW_SCRATCH * n_chunks + c), header.scratch_nbytes());
        // A block is shared by as many blocks of threads as it has tiles.
        const i64 parts = (header.blocksize + tile_nbytes - 1) / tile_nbytes;
        for (i64 item = tile; item < header.n_blocks() * parts; item += tiles) {
            const i64 block = item / parts, part = item - block * parts;
            const i64 block_nbytes = header.block_nbytes(block), n_elements = block_nbytes / header.typesize;
            const i32 n_splits = header.n_splits(block);
            const ShuffledBlock shuffled{
                chunk_scratch.part(block * header.block_slots_nbytes(0), header.block_slots_nbytes(block)),
                n_splits > 1 ? header.slot_nbytes(n_elements) : n_elements, n_elements, header.typesize};
            unshuffle_block(shuffled, flags, dest.part(block * header.blocksize, block_nbytes),
                            part * blockDim.x + threadIdx.x, parts * blockDim.x);
        }
    }
}
