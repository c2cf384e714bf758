// Arithmetic on device memory: reductions, products, and casts to narrow formats with error feedback.
//
// Compiled by NVRTC for the device at hand, and by a C++ compiler for tests on the host, so it needs
// no header and no intrinsic but those of CUDA C itself. Every kernel takes any number of threads,
// touches 16 bytes at a time where all of its pointers are aligned, and needs no barrier: what the
// threads of a block have to agree on goes through atomics.
//
// Rounding is to nearest even everywhere; contraction into fused multiply-adds is switched off, so
// that results have the same bits as on hosts.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

#define KERNEL(name) extern "C" __global__ void pycomm_##name

#define MOST_SOURCES 128

struct Sources {
    const void *at[MOST_SOURCES];
};

static __device__ __forceinline__ u64 first_thread() {
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ __forceinline__ u64 all_threads() { return (u64)gridDim.x * blockDim.x; }

// ------------------------------------------------------------------------------- narrow floats
//
// A format of 1 sign bit, EXPONENT bits and MANTISSA bits. IEEE says whether its highest exponent
// means infinity and NaN; otherwise only the highest code of all is NaN (float8_e4m3fn).

static __device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float((u32)(exponent + 127) << 23);  // of a normal float32
}

template <int EXPONENT, int MANTISSA, bool IEEE> struct Format {
    static const int BIAS = (1 << (EXPONENT - 1)) - 1;
    static const u32 NAN_CODE = IEEE ? ((1u << EXPONENT) - 1) << MANTISSA | 1u << (MANTISSA - 1)
                                     : (1u << (EXPONENT + MANTISSA)) - 1;
    // What is too large: infinity, or NaN where there is none.
    static const u32 TOP = IEEE ? ((1u << EXPONENT) - 1) << MANTISSA : NAN_CODE;
    static const u32 LARGEST = TOP - 1;

    // Without saturation; `lost` tells whether a finite value was too large.
    static __device__ __forceinline__ u32 narrow(float value, bool *lost) {
        u32 bits = __float_as_uint(value), size = bits & 0x7fffffffu;
        u32 sign = bits >> 31 << (EXPONENT + MANTISSA);
        *lost = false;
        if (size > 0x7f800000u) return sign | NAN_CODE;
        if (size == 0x7f800000u) return sign | TOP;
        u32 code;
        if (EXPONENT < 8 && size < (u32)(128 - BIAS) << 23) {
            // Subnormal there: adding 2**23 quanta leaves their number in the low bits, rounded.
            float magic = power_of_two(23 + 1 - BIAS - MANTISSA);
            code = __float_as_uint(__uint_as_float(size) + magic) - __float_as_uint(magic);
        } else {
            const int cut = 23 - MANTISSA;
            code = (size + ((1u << (cut - 1)) - 1) + (size >> cut & 1)) >> cut;
            code -= (u32)(127 - BIAS) << MANTISSA;
        }
        if (code >= TOP) {
            *lost = true;
            code = TOP;
        }
        return sign | code;
    }

    static __device__ __forceinline__ float widen(u32 code) {
        u32 size = code & ((1u << (EXPONENT + MANTISSA)) - 1);
        u32 sign = code >> (EXPONENT + MANTISSA) << 31;
        u32 high = size >> MANTISSA;
        u32 bits;
        if (IEEE ? high == (1u << EXPONENT) - 1 : size == NAN_CODE)
            bits = IEEE && size == TOP ? 0x7f800000u : 0x7fc00000u;
        else if (EXPONENT < 8 && high == 0)
            bits = __float_as_uint((float)size * power_of_two(1 - BIAS - MANTISSA));
        else
            bits = (size << (23 - MANTISSA)) + ((u32)(127 - BIAS) << 23);
        return __uint_as_float(sign | bits);
    }
};

typedef Format<5, 10, true> Half;
typedef Format<8, 7, true> Brain;
typedef Format<4, 3, false> E4M3;
typedef Format<5, 2, true> E5M2;

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

// --------------------------------------------------------------------------------- arithmetic
//
// Halves are widened to float32, and rounded once at the end; other types are what they are. An
// average of integers is a 64-bit sum.

template <class T> struct Type {
    typedef T Wide;
    static __device__ __forceinline__ T widen(T value) { return value; }
    static __device__ __forceinline__ T narrow(T value) { return value; }
};
template <> struct Type<f16> {
    typedef float Wide;
    static __device__ __forceinline__ float widen(f16 value) { return Half::widen(value.bits); }
    static __device__ __forceinline__ f16 narrow(float value) {
        bool lost;
        f16 made;
        made.bits = (u16)Half::narrow(value, &lost);
        return made;
    }
};
template <> struct Type<bf16> {
    typedef float Wide;
    static __device__ __forceinline__ float widen(bf16 value) { return Brain::widen(value.bits); }
    static __device__ __forceinline__ bf16 narrow(float value) {
        bool lost;
        bf16 made;
        made.bits = (u16)Brain::narrow(value, &lost);
        return made;
    }
};

template <class T> struct Summed { typedef typename Type<T>::Wide Wide; };
template <> struct Summed<i8> { typedef i64 Wide; };
template <> struct Summed<i16> { typedef i64 Wide; };
template <> struct Summed<i32> { typedef i64 Wide; };
template <> struct Summed<u8> { typedef u64 Wide; };
template <> struct Summed<u16> { typedef u64 Wide; };
template <> struct Summed<u32> { typedef u64 Wide; };

struct Sum {
    template <class T> struct In { typedef typename Type<T>::Wide Wide; };
    template <class W> static __device__ __forceinline__ W of(W a, W b) { return a + b; }
    template <class W> static __device__ __forceinline__ W end(W total, u32) { return total; }
};
struct Prod {
    template <class T> struct In { typedef typename Type<T>::Wide Wide; };
    template <class W> static __device__ __forceinline__ W of(W a, W b) { return a * b; }
    template <class W> static __device__ __forceinline__ W end(W total, u32) { return total; }
};
// NaN wins, whichever side it is on.
struct Min {
    template <class T> struct In { typedef typename Type<T>::Wide Wide; };
    template <class W> static __device__ __forceinline__ W of(W a, W b) {
        return a != a || a < b ? a : b;
    }
    template <class W> static __device__ __forceinline__ W end(W total, u32) { return total; }
};
struct Max {
    template <class T> struct In { typedef typename Type<T>::Wide Wide; };
    template <class W> static __device__ __forceinline__ W of(W a, W b) {
        return a != a || a > b ? a : b;
    }
    template <class W> static __device__ __forceinline__ W end(W total, u32) { return total; }
};
struct Avg {
    template <class T> struct In { typedef typename Summed<T>::Wide Wide; };
    template <class W> static __device__ __forceinline__ W of(W a, W b) { return a + b; }
    template <class W> static __device__ __forceinline__ W end(W total, u32 number) {
        return total / (W)number;
    }
};

template <class T> struct Pack {
    static const int LENGTH = 16 / sizeof(T);
    union {
        uint4 raw;
        T values[LENGTH];
    };
};

template <class T, class Op>
static __device__ __forceinline__ T reduced(const Sources &sources, u32 number, u64 index) {
    typedef typename Op::template In<T>::Wide Wide;
    Wide total = (Wide)Type<T>::widen(((const T *)sources.at[0])[index]);
    for (u32 one = 1; one < number; one++)
        total = Op::of(total, (Wide)Type<T>::widen(((const T *)sources.at[one])[index]));
    return Type<T>::narrow((typename Type<T>::Wide)Op::end(total, number));
}

// Combines sources, in their order, into a target that may be one of them.
template <class T, class Op>
static __device__ __forceinline__ void reduce(T *target, Sources sources, u32 number, u64 count) {
    typedef typename Op::template In<T>::Wide Wide;
    const int LENGTH = Pack<T>::LENGTH;
    u64 bits = (u64)target;
    for (u32 one = 0; one < number; one++) bits |= (u64)sources.at[one];
    u64 packs = bits % 16 ? 0 : count / LENGTH;
    for (u64 at = first_thread(); at < packs; at += all_threads()) {
        Pack<T> given;
        Wide total[LENGTH];
        given.raw = ((const uint4 *)sources.at[0])[at];
        for (int lane = 0; lane < LENGTH; lane++)
            total[lane] = (Wide)Type<T>::widen(given.values[lane]);
        for (u32 one = 1; one < number; one++) {
            given.raw = ((const uint4 *)sources.at[one])[at];
            for (int lane = 0; lane < LENGTH; lane++)
                total[lane] = Op::of(total[lane], (Wide)Type<T>::widen(given.values[lane]));
        }
        for (int lane = 0; lane < LENGTH; lane++)
            given.values[lane] =
                Type<T>::narrow((typename Type<T>::Wide)Op::end(total[lane], number));
        ((uint4 *)target)[at] = given.raw;
    }
    for (u64 at = packs * LENGTH + first_thread(); at < count; at += all_threads())
        target[at] = reduced<T, Op>(sources, number, at);
}

#define REDUCE(op, Op, name, T)                                                    \
    KERNEL(reduce_##op##_##name)(T * target, Sources sources, u32 number, u64 count) { \
        reduce<T, Op>(target, sources, number, count);                             \
    }
#define REDUCTIONS(name, T)     \
    REDUCE(sum, Sum, name, T)   \
    REDUCE(prod, Prod, name, T) \
    REDUCE(min, Min, name, T)   \
    REDUCE(max, Max, name, T)   \
    REDUCE(avg, Avg, name, T)

REDUCTIONS(int8, i8)
REDUCTIONS(uint8, u8)
REDUCTIONS(int16, i16)
REDUCTIONS(uint16, u16)
REDUCTIONS(int32, i32)
REDUCTIONS(uint32, u32)
REDUCTIONS(int64, i64)
REDUCTIONS(uint64, u64)
REDUCTIONS(float16, f16)
REDUCTIONS(bfloat16, bf16)
REDUCTIONS(float32, float)
REDUCTIONS(float64, double)

// Multiplies by a factor, in the type that sums have, or divides; the target may be the source.
#define SCALE(name, T, W)                                                                     \
    KERNEL(scale_##name)(T * target, const T *source, W factor, u64 count) {                  \
        for (u64 at = first_thread(); at < count; at += all_threads())                        \
            target[at] = Type<T>::narrow((Type<T>::Wide)(Type<T>::widen(source[at]) * factor)); \
    }

SCALE(int8, i8, i64)
SCALE(uint8, u8, i64)
SCALE(int16, i16, i64)
SCALE(uint16, u16, i64)
SCALE(int32, i32, i64)
SCALE(uint32, u32, i64)
SCALE(int64, i64, i64)
SCALE(uint64, u64, i64)
SCALE(float16, f16, float)
SCALE(bfloat16, bf16, float)
SCALE(float32, float, float)
SCALE(float64, double, double)

#define DIVIDE(name, T)                                                            \
    KERNEL(divide_##name)(T * target, T divisor, u64 count) {                      \
        for (u64 at = first_thread(); at < count; at += all_threads())             \
            target[at] = target[at] / divisor;                                     \
    }

DIVIDE(float32, float)
DIVIDE(float64, double)

// A complex factor; `count` numbers of two parts each.
#define TURN(name, T)                                                                          \
    KERNEL(turn_##name)(T * target, const T *source, T real, T imaginary, u64 count) {         \
        for (u64 at = first_thread(); at < count; at += all_threads()) {                       \
            T a = source[2 * at], b = source[2 * at + 1];                                      \
            target[2 * at] = a * real - b * imaginary;                                         \
            target[2 * at + 1] = a * imaginary + b * real;                                     \
        }                                                                                      \
    }

TURN(complex64, float)
TURN(complex128, double)

// --------------------------------------------------------------------------------- encoding
//
// What `pycomm.kernels.casts` does on hosts, bit for bit. Encoded values come first, then one byte
// for each block of 2**shift values: the exponent of its scale plus 127. shift 32: no scales.

#define NO_BLOCKS 32

static __device__ __forceinline__ bool is_finite(float value) {
    return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
}

// A sum of finite values that overflowed becomes the largest float32.
static __device__ __forceinline__ float with_residual(float value, float residual) {
    float sum = value + residual;
    if (is_finite(value) && (__float_as_uint(sum) & 0x7fffffffu) == 0x7f800000u)
        sum = __uint_as_float((__float_as_uint(sum) & 0x80000000u) | 0x7f7fffffu);
    return sum;
}

// Finds the largest finite magnitude of each block, as the bits of a float32; `peaks` are 0 before.
// With residuals, `source` plus `residual` takes the place of both.
KERNEL(peaks)(u32 *peaks, const float *source, float *residual, u64 count, u32 shift) {
    for (u64 four = first_thread(); four * 4 < count; four += all_threads()) {
        u32 most = 0;
        u64 block = four * 4 >> shift;
        for (u64 at = four * 4; at < four * 4 + 4 && at < count; at++) {
            float value = source[at];
            if (residual) residual[at] = value = with_residual(value, residual[at]);
            u32 size = __float_as_uint(value) & 0x7fffffffu;
            if (at >> shift != block) {  // blocks of fewer than four values
                atomicMax(&peaks[block], most);
                most = 0;
                block = at >> shift;
            }
            if (size < 0x7f800000u && size > most) most = size;
        }
        atomicMax(&peaks[block], most);
    }
}

// The smallest power of two by which a block with this largest value fits a format, plus 127.
template <class F> static __device__ __forceinline__ u32 scale_of(u32 peak) {
    u32 largest = __float_as_uint(F::widen(F::LARGEST));
    int power = (int)(peak >> 23) - (int)(largest >> 23) + 127;
    power += (peak & 0x7fffffu) > (largest & 0x7fffffu);
    int highest = 3 * 127 - (int)(largest >> 23);
    return (u32)(power < 1 ? 1 : power > highest ? highest : power);
}

// Encodes `source`, or with residuals source + residual, whose rounding errors stay there.
// tally[0] counts values that were too large, tally[1] errors that were not finite and are dropped.
template <class F, class Code>
static __device__ __forceinline__ void encode(u8 *codes, const u32 *peaks, const float *source,
                                              float *residual, u64 *tally, u64 count, u32 shift,
                                              u32 saturate) {
    u8 *scales = codes + count * sizeof(Code);
    u64 large = 0, dropped = 0;
    for (u64 at = first_thread(); at < count; at += all_threads()) {
        float value, down = 1, up = 1;
        if (shift != NO_BLOCKS) {
            u64 block = at >> shift;
            u32 scale = scale_of<F>(peaks[block]);
            if (at == block << shift) scales[block] = (u8)scale;
            down = __uint_as_float((254 - scale) << 23);
            up = __uint_as_float(scale << 23);
            value = residual ? residual[at] : source[at];  // `peaks` has added them up
        } else {
            value = residual ? with_residual(source[at], residual[at]) : source[at];
        }
        bool lost;
        u32 code = F::narrow(value * down, &lost);
        if (lost) {
            large++;
            if (saturate) code -= F::TOP - F::LARGEST;
        }
        ((Code *)codes)[at] = (Code)code;
        if (residual) {
            float error = value - F::widen(code) * up;
            if (!is_finite(error)) {
                error = 0;
                dropped++;
            }
            residual[at] = error;
        }
    }
    if (large) atomicAdd(&tally[0], large);
    if (dropped) atomicAdd(&tally[1], dropped);
}

template <class F, class Code>
static __device__ __forceinline__ float decoded(const u8 *codes, u64 at, u64 count, u32 shift) {
    float value = F::widen(((const Code *)codes)[at]);
    if (shift != NO_BLOCKS)
        value *= __uint_as_float((u32)codes[count * sizeof(Code) + (at >> shift)] << 23);
    return value;
}

template <class F, class Code>
static __device__ __forceinline__ void decode(float *target, const u8 *codes, u64 count, u32 shift) {
    for (u64 at = first_thread(); at < count; at += all_threads())
        target[at] = decoded<F, Code>(codes, at, count, shift);
}

// Adds up what ranks have sent, in their order, with the own values as they are.
template <class F, class Code>
static __device__ __forceinline__ void add_up(float *total, Sources come, const float *own,
                                              u32 ranks, u32 index, float divisor, u64 count,
                                              u32 shift) {
    for (u64 at = first_thread(); at < count; at += all_threads()) {
        float sum = 0;
        for (u32 rank = 0; rank < ranks; rank++) {
            float value = rank == index
                              ? own[at]
                              : decoded<F, Code>((const u8 *)come.at[rank], at, count, shift);
            sum = rank ? sum + value : value;
        }
        total[at] = divisor != 1 ? sum / divisor : sum;
    }
}

#define CODEC(name, F, Code)                                                                      \
    KERNEL(encode_##name)(u8 * codes, const u32 *peaks, const float *source, float *residual,     \
                          u64 *tally, u64 count, u32 shift, u32 saturate) {                       \
        encode<F, Code>(codes, peaks, source, residual, tally, count, shift, saturate);           \
    }                                                                                             \
    KERNEL(decode_##name)(float *target, const u8 *codes, u64 count, u32 shift) {                 \
        decode<F, Code>(target, codes, count, shift);                                             \
    }                                                                                             \
    KERNEL(add_up_##name)(float *total, Sources come, const float *own, u32 ranks, u32 index,     \
                          float divisor, u64 count, u32 shift) {                                  \
        add_up<F, Code>(total, come, own, ranks, index, divisor, count, shift);                   \
    }

CODEC(fp16, Half, u16)
CODEC(bf16, Brain, u16)
CODEC(fp8_e4m3, E4M3, u8)
CODEC(fp8_e5m2, E5M2, u8)
