/*
 * CUDA C for the compiler of the host: what the kernels of this project use, and no more.
 *
 * Threads of a block run one after the other, so a kernel must not synchronise them.
 */
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#define DOUBLE_KERNEL_SHIM 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(bytes) __attribute__((aligned(bytes)))

struct double_dim3 {
    unsigned x, y, z;
};
static thread_local double_dim3 threadIdx, blockIdx, blockDim, gridDim;
static constexpr int warpSize = 32;

#define DOUBLE_VECTORS(type, name, two, four)                                                      \
    struct alignas(two) name##2 {                                                                  \
        type x, y;                                                                                 \
    };                                                                                             \
    struct alignas(four) name##4 {                                                                 \
        type x, y, z, w;                                                                           \
    };                                                                                             \
    static inline name##2 make_##name##2(type x, type y) { return {x, y}; }                        \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

DOUBLE_VECTORS(unsigned char, uchar, 2, 4)
DOUBLE_VECTORS(signed char, char, 2, 4)
DOUBLE_VECTORS(unsigned short, ushort, 4, 8)
DOUBLE_VECTORS(short, short, 4, 8)
DOUBLE_VECTORS(unsigned, uint, 8, 16)
DOUBLE_VECTORS(int, int, 8, 16)
DOUBLE_VECTORS(float, float, 8, 16)
DOUBLE_VECTORS(double, double, 16, 16)
DOUBLE_VECTORS(unsigned long long, ulonglong, 16, 16)
DOUBLE_VECTORS(long long, longlong, 16, 16)

/* Several streams may run kernels on the same word at once. */
template <typename T> static inline T atomicAdd(T *target, T value)
{
    return __atomic_fetch_add(target, value, __ATOMIC_RELAXED);
}
template <typename T> static inline T double_atomic_pick(T *target, T value, bool larger)
{
    T seen = __atomic_load_n(target, __ATOMIC_RELAXED);
    while ((larger ? value > seen : value < seen) &&
           !__atomic_compare_exchange_n(target, &seen, value, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    return seen;
}
template <typename T> static inline T atomicMax(T *target, T value)
{
    return double_atomic_pick(target, value, true);
}
template <typename T> static inline T atomicMin(T *target, T value)
{
    return double_atomic_pick(target, value, false);
}
template <typename T> static inline T atomicOr(T *target, T value)
{
    return __atomic_fetch_or(target, value, __ATOMIC_RELAXED);
}
template <typename T> static inline T atomicAnd(T *target, T value)
{
    return __atomic_fetch_and(target, value, __ATOMIC_RELAXED);
}
template <typename T> static inline T atomicExch(T *target, T value)
{
    return __atomic_exchange_n(target, value, __ATOMIC_RELAXED);
}
template <typename T> static inline T atomicCAS(T *target, T expected, T value)
{
    __atomic_compare_exchange_n(target, &expected, value, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return expected;
}

template <typename To, typename From> static inline To double_bits(From value)
{
    static_assert(sizeof(To) == sizeof(From), "bits of one size");
    To bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline unsigned __float_as_uint(float value) { return double_bits<unsigned>(value); }
static inline int __float_as_int(float value) { return double_bits<int>(value); }
static inline float __uint_as_float(unsigned bits) { return double_bits<float>(bits); }
static inline float __int_as_float(int bits) { return double_bits<float>(bits); }
static inline long long __double_as_longlong(double v) { return double_bits<long long>(v); }
static inline double __longlong_as_double(long long v) { return double_bits<double>(v); }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __int2float_rn(int a) { return (float)a; }
static inline float __uint2float_rn(unsigned a) { return (float)a; }
static inline int __float2int_rn(float a)
{
    if (std::isnan(a))
        return 0;
    if (a >= 2147483648.0f)
        return std::numeric_limits<int>::max();
    return a <= -2147483648.0f ? std::numeric_limits<int>::min() : (int)std::nearbyint(a);
}
static inline int __clz(int value) { return value ? __builtin_clz((unsigned)value) : 32; }
static inline int __clzll(long long value)
{
    return value ? __builtin_clzll((unsigned long long)value) : 64;
}
static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __ffs(int value) { return __builtin_ffs(value); }
static inline unsigned __umulhi(unsigned a, unsigned b)
{
    return (unsigned)(((unsigned long long)a * b) >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
template <typename T> static inline T __ldg(const T *source) { return *source; }
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <typename A, typename B> static inline std::common_type_t<A, B> min(A a, B b)
{
    using common = std::common_type_t<A, B>;
    return (common)b < (common)a ? (common)b : (common)a;
}
template <typename A, typename B> static inline std::common_type_t<A, B> max(A a, B b)
{
    using common = std::common_type_t<A, B>;
    return (common)a < (common)b ? (common)b : (common)a;
}
using std::isfinite;
using std::isinf;
using std::isnan;
static inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }

/* Calls a kernel once for every thread, with parameters of the types that it declares. */
template <typename... Parameters, std::size_t... Index>
static void double_call(void (*kernel)(Parameters...), void **parameters,
                        std::index_sequence<Index...>)
{
    (void)parameters;
    kernel(*static_cast<std::remove_cv_t<Parameters> *>(parameters[Index])...);
}

template <typename... Parameters>
static void double_launch(void (*kernel)(Parameters...), void **parameters, double_dim3 grid,
                          double_dim3 block)
{
    gridDim = grid;
    blockDim = block;
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++)
                for (threadIdx.z = 0; threadIdx.z < block.z; threadIdx.z++)
                    for (threadIdx.y = 0; threadIdx.y < block.y; threadIdx.y++)
                        for (threadIdx.x = 0; threadIdx.x < block.x; threadIdx.x++)
                            double_call(kernel, parameters,
                                        std::index_sequence_for<Parameters...>{});
}

template <typename... Parameters>
static const std::size_t *double_sizes(void (*)(Parameters...), unsigned *count)
{
    static const std::size_t sizes[] = {sizeof(Parameters)..., 0};
    *count = sizeof...(Parameters);
    return sizes;
}

#define DOUBLE_KERNEL(name)                                                                        \
    extern "C" __attribute__((visibility("default"))) void double_launch_##name(                   \
        void **parameters, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,        \
        unsigned bz)                                                                               \
    {                                                                                              \
        double_launch(name, parameters, {gx, gy, gz}, {bx, by, bz});                               \
    }                                                                                              \
    extern "C" __attribute__((visibility("default"))) const std::size_t *double_parameters_##name( \
        unsigned *count)                                                                           \
    {                                                                                              \
        return double_sizes(name, count);                                                          \
    }
