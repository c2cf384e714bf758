// Reductions and products.
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

// Gives each element a new value; the target may be the source.
template <class T, class Each>
static __device__ __forceinline__ void map(T *target, const T *source, u64 count, Each each) {
    const int LENGTH = Pack<T>::LENGTH;
    u64 packs = ((u64)target | (u64)source) % 16 ? 0 : count / LENGTH;
    for (u64 at = first_thread(); at < packs; at += all_threads()) {
        Pack<T> pack;
        pack.raw = ((const uint4 *)source)[at];
        for (int lane = 0; lane < LENGTH; lane++) pack.values[lane] = each.of(pack.values[lane]);
        ((uint4 *)target)[at] = pack.raw;
    }
    for (u64 at = packs * LENGTH + first_thread(); at < count; at += all_threads())
        target[at] = each.of(source[at]);
}

// Multiplies by a factor, in the type that sums have, or divides.
template <class T, class W> struct Times {
    W factor;
    __device__ __forceinline__ T of(T value) const {
        return Type<T>::narrow((typename Type<T>::Wide)(Type<T>::widen(value) * factor));
    }
};
template <class T> struct Over {
    T divisor;
    __device__ __forceinline__ T of(T value) const { return value / divisor; }
};

#define SCALE(name, T, W)                                                    \
    KERNEL(scale_##name)(T * target, const T *source, W factor, u64 count) { \
        Times<T, W> times = {factor};                                        \
        map(target, source, count, times);                                   \
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

#define DIVIDE(name, T)                                       \
    KERNEL(divide_##name)(T * target, T divisor, u64 count) { \
        Over<T> over = {divisor};                             \
        map(target, target, count, over);                     \
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
