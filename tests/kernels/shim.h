// Runs the kernels' own sources on the host: what CUDA gives a kernel, a loop over the grid, and calls by name over a
// pipe.
//
// Threads run one after the other, so kernels may not wait for each other (none does). Every array argument is copied
// into an allocation of exactly its size, so the address sanitizer sees the first byte read or written outside.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

struct ThreadPosition {
    unsigned x = 0, y = 0, z = 0;
};
static ThreadPosition threadIdx, blockIdx;
static ThreadPosition blockDim{1, 1, 1}, gridDim{1, 1, 1};

template <class T>
T atomicAdd(T* address, T value) {
    const T before = *address;
    *address = before + value;
    return before;
}

template <class T>
T atomicMax(T* address, T value) {
    const T before = *address;
    if (value > before) *address = value;
    return before;
}

template <class T>
T atomicXor(T* address, T value) {
    const T before = *address;
    *address = before ^ value;
    return before;
}

namespace shim {

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "shim: %s\n", what);
    std::exit(3);
}

inline void read_exactly(void* data, size_t nbytes) {
    if (nbytes != 0 && std::fread(data, 1, nbytes, stdin) != nbytes) fail("the call is cut short");
}

inline long long read_number() {
    long long number;
    read_exactly(&number, sizeof number);
    return number;
}

// One argument: kind (0 scalar, 1 array, 2 null), bytes, alignment of an array's first byte, and the bytes themselves.
struct Argument {
    long long kind = 0, nbytes = 0;
    char* data = nullptr;

    void read() {
        kind = read_number();
        nbytes = read_number();
        if (kind == 2) return;
        data = static_cast<char*>(std::malloc(nbytes));  // 16-byte aligned, as device allocations are (256)
        read_exactly(data, nbytes);
    }
    template <class T>
    T as() const {
        if constexpr (std::is_pointer_v<T>) {
            if (kind == 0) fail("a scalar was passed for a pointer");
            return reinterpret_cast<T>(data);
        } else {
            if (kind != 0 || nbytes != sizeof(T)) fail("an argument does not fit the kernel's parameter");
            T value;
            std::memcpy(&value, data, sizeof value);
            return value;
        }
    }
};

template <class... Params, size_t... I>
void run_grid(void (*kernel)(Params...), const std::vector<Argument>& args, std::index_sequence<I...>) {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernel(args[I].as<Params>()...);
    }
}

template <class... Params>
void call(void (*kernel)(Params...), const std::vector<Argument>& args) {
    if (args.size() != sizeof...(Params)) fail("the number of arguments does not fit the kernel");
    run_grid(kernel, args, std::index_sequence_for<Params...>{});
}

// Reads one call, runs it through `dispatch(name, args)`, and writes all arrays back. False at the end of the input.
template <class Dispatch>
bool serve(Dispatch dispatch) {
    long long name_nbytes;
    if (std::fread(&name_nbytes, sizeof name_nbytes, 1, stdin) != 1) return false;
    std::string name(name_nbytes, ' ');
    read_exactly(name.data(), name.size());
    gridDim.x = static_cast<unsigned>(read_number());
    blockDim.x = static_cast<unsigned>(read_number());
    std::vector<Argument> args(read_number());
    for (Argument& arg : args) arg.read();
    if (!dispatch(name, args)) fail("no such kernel");
    for (Argument& arg : args) {
        if (arg.kind == 1) std::fwrite(arg.data, 1, arg.nbytes, stdout);
        std::free(arg.data);
    }
    std::fflush(stdout);
    return true;
}

}  // namespace shim
