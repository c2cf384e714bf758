// Integers of given sizes, and narrow floats: what they are and how float32 becomes one of them.

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
