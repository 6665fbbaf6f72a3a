// Decoded chunks into the output, the output's missing chunks, and the guard zones around a decoder's outputs.
//
// Batches are byte buffers; elements are `itemsize` bytes. Offsets and strides are in bytes here: the launchers
// convert.
#include "common.cuh"

// ---- regions: one chunk's part of the output ------------------------------------------------------------------------

// Rows of the axis table, each `ndim` long.
enum AxisRow { AXIS_STEP, AXIS_CHUNK_SHAPE, AXIS_CHUNK_STRIDE, AXIS_OUT_SHAPE, AXIS_OUT_STRIDE };

// Columns over chunks (n_chunks x ndim) and the axis table (5 x ndim).
struct Regions {
    Column out_start, count, inner_start, axes;
    i32 ndim;

    XGZ_FN i64 axis(AxisRow row, i32 k) const { return axes.load(static_cast<i64>(row) * ndim + k); }
    XGZ_FN i64 count_at(i64 chunk, i32 k) const { return count.load(chunk * ndim + k); }
    XGZ_FN i64 source_step(i32 k) const { return axis(AXIS_STEP, k) * axis(AXIS_CHUNK_STRIDE, k); }
    XGZ_FN i64 out_step(i32 k) const { return axis(AXIS_OUT_STRIDE, k); }
};

// One region, its trailing axes merged into runs that are contiguous on both sides.
struct Region {
    i64 source;      // byte offset of the first element in the chunk
    i64 out;         // byte offset of the first element in the output
    i64 run_nbytes;  // bytes contiguous on both sides
    i64 n_runs;      // runs in the region; 0 where there is nothing to copy
    i32 outer_ndim;  // leading axes that still have to be walked
    i32 unit_nbytes;
};

// True if start, start + step, ... (count of them) all lie in [0, length). No product can overflow.
XGZ_FN bool inside(i64 start, i64 step, i64 count, i64 length) {
    if (count < 1 || start < 0 || start >= length) return false;
    if (count == 1 || step == 0) return true;
    if (step > 0) return count - 1 <= (length - 1 - start) / step;
    return step >= -length && count - 1 <= start / -step;
}

// Where chunk `chunk` goes. False if any part of it lies outside the chunk or the output.
XGZ_FN bool find_region(const Regions& regions, i64 chunk, i64 itemsize, u64 address_bits, Region* region) {
    *region = Region{0, 0, itemsize, 1, regions.ndim, 1};
    for (i32 k = 0; k < regions.ndim; ++k) {
        const i64 at = chunk * regions.ndim + k;
        const i64 count = regions.count.load(at);
        if (count == 0) {
            region->n_runs = 0;
            return true;
        }
        const i64 inner_start = regions.inner_start.load(at), out_start = regions.out_start.load(at);
        if (!inside(inner_start, regions.axis(AXIS_STEP, k), count, regions.axis(AXIS_CHUNK_SHAPE, k))) return false;
        if (!inside(out_start, 1, count, regions.axis(AXIS_OUT_SHAPE, k))) return false;
        region->source += inner_start * regions.axis(AXIS_CHUNK_STRIDE, k);
        region->out += out_start * regions.axis(AXIS_OUT_STRIDE, k);
    }
    while (region->outer_ndim > 0) {
        const i32 k = region->outer_ndim - 1;
        const i64 count = regions.count_at(chunk, k);
        if (count > 1) {
            if (regions.source_step(k) != region->run_nbytes || regions.out_step(k) != region->run_nbytes) break;
            region->run_nbytes *= count;
        }
        --region->outer_ndim;
    }
    u64 bits = address_bits | region->source | region->out | region->run_nbytes;
    for (i32 k = 0; k < region->outer_ndim; ++k) {
        const i64 count = regions.count_at(chunk, k);
        region->n_runs *= count;
        if (count > 1) bits |= regions.source_step(k) | regions.out_step(k);
    }
    region->unit_nbytes = alignment_of(bits);
    return true;
}

// A chunk of the batch as the source of units, byte order reversed on the way where asked.
struct ChunkSource {
    Bytes chunk;
    i32 word_nbytes;

    template <class Unit>
    XGZ_FN Unit unit(i64 run_offset, i64 index) const {
        const i64 from = mirrored_unit(index, word_nbytes, sizeof(Unit));
        return swap_unit(load_unit<Unit>(chunk, run_offset + from * static_cast<i64>(sizeof(Unit))), word_nbytes);
    }
};

// One element repeated until it is a multiple of 16 bytes.
struct PatternSource {
    Bytes pattern;

    template <class Unit>
    XGZ_FN Unit unit(i64, i64 index) const {
        return load_unit<Unit>(pattern, index * static_cast<i64>(sizeof(Unit)) % pattern.size);
    }
};

// Units first, first + stride, ... of a region. `Index` is 32 bits wide wherever the region allows: the divisions that
// turn an index into coordinates cost several times more in 64.
template <class Unit, class Index, class Source>
XGZ_FN void write_units(const Regions& regions, i64 chunk, const Region& region, const Source& source, MutableBytes out,
                        i64 first, i64 stride) {
    const Index units_per_run = static_cast<Index>(region.run_nbytes / static_cast<i64>(sizeof(Unit)));
    const i64 n_units = region.n_runs * static_cast<i64>(units_per_run);
    for (i64 i = first; i < n_units; i += stride) {
        Index run = static_cast<Index>(i) / units_per_run;
        const Index unit = static_cast<Index>(i) - run * units_per_run;
        i64 from = region.source, to = region.out;
        for (i32 k = region.outer_ndim - 1; k >= 0; --k) {
            const Index count = static_cast<Index>(regions.count_at(chunk, k));
            if (count == 1) continue;
            const Index next = run / count;
            const i64 position = static_cast<i64>(run - next * count);
            from += position * regions.source_step(k);
            to += position * regions.out_step(k);
            run = next;
        }
        store_unit<Unit>(out, to + static_cast<i64>(unit) * static_cast<i64>(sizeof(Unit)),
                         source.template unit<Unit>(from, static_cast<i64>(unit)));
    }
}

template <class Index, class Source>
XGZ_FN void write_region(const Regions& regions, i64 chunk, const Region& region, const Source& source,
                         MutableBytes out, i64 first, i64 stride) {
    switch (region.unit_nbytes) {
        case 16: return write_units<u128, Index>(regions, chunk, region, source, out, first, stride);
        case 8: return write_units<u64, Index>(regions, chunk, region, source, out, first, stride);
        case 4: return write_units<u32, Index>(regions, chunk, region, source, out, first, stride);
        case 2: return write_units<u16, Index>(regions, chunk, region, source, out, first, stride);
        default: return write_units<u8, Index>(regions, chunk, region, source, out, first, stride);
    }
}

// Copies the regions of chunks into the output: one block a (chunk, tile), `tiles` of them a chunk.
//
// Chunk c starts at chunk_offset[c].
extern "C" __global__ void scatter_slices(const u8* batch, i64 batch_nbytes, const i64* chunk_offset, i64 chunk_nbytes,
                                          u8* out, i64 out_nbytes, const i64* out_start, const i64* count,
                                          const i64* inner_start, i64 n_chunks, const i64* axes, i32 ndim, i64 itemsize,
                                          i32 word_nbytes, i64 tiles, i32* status) {
    const i64 n_cells = n_chunks * ndim;
    const Regions regions{{out_start, n_cells}, {count, n_cells}, {inner_start, n_cells}, {axes, 5 * ndim}, ndim};
    for (i64 work = blockIdx.x; work < n_chunks * tiles; work += gridDim.x) {
        const i64 chunk = work / tiles, tile = work - chunk * tiles;
        const i64 offset = Column{chunk_offset, n_chunks}.load(chunk);
        const Bytes bytes = Bytes{batch, batch_nbytes}.part(offset, chunk_nbytes);
        Region region;
        if (bytes.size != chunk_nbytes ||
            !find_region(regions, chunk, itemsize, address_of(bytes.data) | address_of(out), &region)) {
            report({status, 1}, 1);
            continue;
        }
        const ChunkSource source{bytes, word_nbytes};
        const i64 first = tile * blockDim.x + threadIdx.x, stride = tiles * blockDim.x;
        if (region.n_runs * region.run_nbytes < 0x7FFFFFFF) {
            write_region<u32>(regions, chunk, region, source, {out, out_nbytes}, first, stride);
        } else {
            write_region<u64>(regions, chunk, region, source, {out, out_nbytes}, first, stride);
        }
    }
}

// Writes one element over regions of the output: those of missing chunks. Blocks and tiles as in `scatter_slices`.
//
// The axis table describes the output twice, as source and as destination, with step 1.
extern "C" __global__ void fill_slices(const u8* pattern, i64 pattern_nbytes, u8* out, i64 out_nbytes,
                                       const i64* out_start, const i64* count, i64 n_regions, const i64* axes, i32 ndim,
                                       i64 itemsize, i64 tiles, i32* status) {
    const i64 n_cells = n_regions * ndim;
    const Regions regions{{out_start, n_cells}, {count, n_cells}, {out_start, n_cells}, {axes, 5 * ndim}, ndim};
    for (i64 work = blockIdx.x; work < n_regions * tiles; work += gridDim.x) {
        const i64 chunk = work / tiles, tile = work - chunk * tiles;
        Region region;
        if (!find_region(regions, chunk, itemsize, address_of(pattern) | address_of(out), &region)) {
            report({status, 1}, 1);
            continue;
        }
        const PatternSource source{{pattern, pattern_nbytes}};
        const i64 first = tile * blockDim.x + threadIdx.x, stride = tiles * blockDim.x;
        if (region.n_runs * region.run_nbytes < 0x7FFFFFFF) {
            write_region<u32>(regions, chunk, region, source, {out, out_nbytes}, first, stride);
        } else {
            write_region<u64>(regions, chunk, region, source, {out, out_nbytes}, first, stride);
        }
    }
}

// ---- gather: any product of index tables ----------------------------------------------------------------------------

// What a slot says of a chunk that is not in the batch.
enum Slot { SLOT_SKIP = -1, SLOT_FILL = -2 };

// Rows of the group table, each `n_groups` long: positions in the group, where its tables start, and how far apart its
// chunk rows lie in the slot table.
enum GroupRow { GROUP_SIZE, GROUP_TABLE_START, GROUP_ROW_STRIDE };

struct Gather {
    Bytes batch;
    MutableBytes out;
    Column chunk_offset, inner, groups;
    Span<const i32> row, slot;
    Bytes fill;
    i64 chunk_nbytes, itemsize;
    i32 n_groups, word_nbytes;

    XGZ_FN i64 group(GroupRow which, i32 g) const { return groups.load(static_cast<i64>(which) * n_groups + g); }
};

template <class Unit>
XGZ_FN void copy_units(Bytes source, i64 from, MutableBytes out, i64 to, i64 nbytes, i32 word_nbytes) {
    const ChunkSource chunk{source, word_nbytes};
    for (i64 unit = 0; unit < nbytes / static_cast<i64>(sizeof(Unit)); ++unit) {
        store_unit<Unit>(out, to + unit * static_cast<i64>(sizeof(Unit)), chunk.template unit<Unit>(from, unit));
    }
}

XGZ_FN void copy_element(const Gather& gather, Bytes source, i64 from, i64 element, i32 word_nbytes) {
    const i64 to = element * gather.itemsize;
    const u64 bits = address_of(source.data) | from | address_of(gather.out.data) | to | gather.itemsize;
    switch (alignment_of(bits)) {
        case 16: return copy_units<u128>(source, from, gather.out, to, gather.itemsize, word_nbytes);
        case 8: return copy_units<u64>(source, from, gather.out, to, gather.itemsize, word_nbytes);
        case 4: return copy_units<u32>(source, from, gather.out, to, gather.itemsize, word_nbytes);
        case 2: return copy_units<u16>(source, from, gather.out, to, gather.itemsize, word_nbytes);
        default: return copy_units<u8>(source, from, gather.out, to, gather.itemsize, word_nbytes);
    }
}

// Copies output element `element` from its chunk. False if the tables point outside the batch.
template <class Index>
XGZ_FN bool gather_element(const Gather& gather, i64 element) {
    Index rest = static_cast<Index>(element);
    i64 chunk = 0, inner = 0;
    for (i32 g = gather.n_groups - 1; g >= 0; --g) {
        const Index size = static_cast<Index>(gather.group(GROUP_SIZE, g));
        const Index next = rest / size;
        const i64 at = gather.group(GROUP_TABLE_START, g) + static_cast<i64>(rest - next * size);
        if (!gather.row.holds(at, 1)) return false;
        chunk += gather.row.load(at) * gather.group(GROUP_ROW_STRIDE, g);
        inner += gather.inner.load(at);
        rest = next;
    }
    if (!gather.slot.holds(chunk, 1)) return false;
    const i32 slot = gather.slot.load(chunk);
    if (slot == SLOT_SKIP) return true;
    Bytes source = gather.fill;
    if (slot != SLOT_FILL) {
        if (!gather.chunk_offset.holds(slot, 1)) return false;
        const i64 offset = gather.chunk_offset.load(slot);
        source = gather.batch.part(offset, gather.chunk_nbytes);
    } else {
        inner = 0;
    }
    if (!source.holds(inner, gather.itemsize)) return false;
    copy_element(gather, source, inner, element, slot == SLOT_FILL ? 1 : gather.word_nbytes);
    return true;
}

// Fills output elements from tables: position p of group g lies in chunk row row[start_g + p] of that group, `inner`
// bytes into the chunk; the groups' inner offsets add up, and so do their rows times the row strides, which index
// `slot`. Slot s starts at chunk_offset[s].
extern "C" __global__ void gather_elements(const u8* batch, i64 batch_nbytes, const i64* chunk_offset, i64 n_slots,
                                           i64 chunk_nbytes, u8* out, i64 n_elements, const i32* row, const i64* inner,
                                           i64 table_size, const i64* groups, i32 n_groups, const i32* slot,
                                           i64 n_chunks, const u8* fill, i64 fill_nbytes, i64 itemsize, i32 word_nbytes,
                                           i32* status) {
    const Gather gather{{batch, batch_nbytes},
                        {out, n_elements * itemsize},
                        {chunk_offset, n_slots},
                        {inner, table_size},
                        {groups, 3 * n_groups},
                        {row, table_size},
                        {slot, n_chunks},
                        {fill, fill_nbytes},
                        chunk_nbytes,
                        itemsize,
                        n_groups,
                        word_nbytes};
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    bool good = true;
    for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < n_elements; i += stride) {
        good &= n_elements < 0x7FFFFFFF ? gather_element<u32>(gather, i) : gather_element<u64>(gather, i);
    }
    if (!good) report({status, 1}, 1);
}

// ---- plain copies and guard zones -----------------------------------------------------------------------------------

// Copies runs of bytes from one buffer to another, whatever their alignment: one block a (run, tile), `tiles` a run.
extern "C" __global__ void copy_bytes(const u8* source, i64 source_nbytes, u8* out, i64 out_nbytes,
                                      const i64* source_offset, const i64* out_offset, const i64* nbytes, i64 n_runs,
                                      i64 tiles, i32* status) {
    const Column from{source_offset, n_runs}, to{out_offset, n_runs}, length{nbytes, n_runs};
    for (i64 work = blockIdx.x; work < n_runs * tiles; work += gridDim.x) {
        const i64 run = work / tiles, tile = work - run * tiles;
        const Bytes in = Bytes{source, source_nbytes}.part(from.load(run), length.load(run));
        const MutableBytes dest = MutableBytes{out, out_nbytes}.part(to.load(run), length.load(run));
        if (in.size != length.load(run) || dest.size != in.size) {
            report({status, 1}, 1);
            continue;
        }
        copy_run(in, dest, tile * blockDim.x + threadIdx.x, tiles * blockDim.x);
    }
}

extern "C" __global__ void write_guards(u8* buffer, i64 buffer_nbytes, const i64* offset, i64 n_guards,
                                        i64 guard_nbytes, i32* status) {
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < n_guards * guard_nbytes; i += stride) {
        const i64 guard = i / guard_nbytes, byte = i - guard * guard_nbytes;
        const MutableBytes zone =
            MutableBytes{buffer, buffer_nbytes}.part(Column{offset, n_guards}.load(guard), guard_nbytes);
        if (zone.size != guard_nbytes) report({status, 1}, 1);
        zone.store(byte, guard_byte(byte));
    }
}

// Sets broken[g] to 1 where guard zone g no longer holds its pattern, or lies outside the buffer; leaves the others.
extern "C" __global__ void check_guards(const u8* buffer, i64 buffer_nbytes, const i64* offset, i64 n_guards,
                                        i64 guard_nbytes, i32* broken) {
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < n_guards * guard_nbytes; i += stride) {
        const i64 guard = i / guard_nbytes, byte = i - guard * guard_nbytes;
        const Bytes zone = Bytes{buffer, buffer_nbytes}.part(Column{offset, n_guards}.load(guard), guard_nbytes);
        if (zone.size != guard_nbytes || zone.load(byte) != guard_byte(byte)) {
            Span<i32>{broken, n_guards}.store(guard, 1);
        }
    }
}
