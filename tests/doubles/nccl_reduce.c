/*
 * Reductions, in the order of ranks.
 *
 * Halves and smaller floats are added up in float and rounded once. An average of floats is a sum
 * of values times 1/n, as in the library; one of integers is a sum that is divided, truncating.
 */
#include "nccl_state.h"

#include <math.h>

/* --- small floats ---------------------------------------------------------------------------- */

typedef struct {
    int exponent_bits, mantissa_bits;
    bool infinite; /* has infinities; else the largest exponent has numbers */
    bool saturates;
} layout;

static const layout HALF = {5, 10, true, false}, BRAIN = {8, 7, true, false},
                    E4M3 = {4, 3, false, true}, E5M2 = {5, 2, true, true};

static float decode(unsigned bits, layout of)
{
    unsigned sign = bits >> (of.exponent_bits + of.mantissa_bits) & 1;
    unsigned top = (1u << of.exponent_bits) - 1, ones = (1u << of.mantissa_bits) - 1;
    unsigned exponent = bits >> of.mantissa_bits & top, mantissa = bits & ones;
    int bias = (1 << (of.exponent_bits - 1)) - 1;
    float value;
    if (exponent == top && of.infinite)
        value = mantissa ? NAN : INFINITY;
    else if (exponent == top && mantissa == ones && !of.infinite)
        value = NAN;
    else if (exponent == 0)
        value = ldexpf((float)mantissa, 1 - bias - of.mantissa_bits);
    else
        value = ldexpf((float)(mantissa | 1u << of.mantissa_bits),
                       (int)exponent - bias - of.mantissa_bits);
    return sign ? -value : value;
}

static unsigned encode(float value, layout of)
{
    unsigned sign = signbit(value) ? 1u << (of.exponent_bits + of.mantissa_bits) : 0;
    unsigned top = ((1u << of.exponent_bits) - 1) << of.mantissa_bits;
    unsigned ones = (1u << of.mantissa_bits) - 1;
    unsigned nan = of.infinite ? top | 1u << (of.mantissa_bits - 1) : top | ones;
    unsigned largest = of.infinite ? top - 1 : (top | ones) - 1;
    unsigned over = of.saturates ? largest : top;
    int bias = (1 << (of.exponent_bits - 1)) - 1, exponent;
    if (isnan(value))
        return sign | nan;
    double magnitude = fabs((double)value);
    if (isinf(magnitude))
        return sign | over;
    frexp(magnitude, &exponent);
    exponent -= 1;
    if (magnitude == 0 || exponent < 1 - bias)
        exponent = 1 - bias;
    /* In units of the last place; rint rounds to even. Carries run into the exponent. */
    unsigned units = (unsigned)rint(ldexp(magnitude, of.mantissa_bits - exponent));
    unsigned bits = ((unsigned)(exponent + bias - 1) << of.mantissa_bits) + units;
    return sign | (bits > largest ? over : bits);
}

/* --- operators ------------------------------------------------------------------------------- */

enum { PREMUL = ncclNumOps };

#define INTEGERS(name, type, wide)                                                                 \
    static void reduce_##name(int op, void *result, void *const *inputs, int nranks,               \
                              size_t count, unsigned char (*scalars)[8])                           \
    {                                                                                              \
        type factors[MAX_RANKS];                                                                   \
        for (int rank = 0; rank < nranks; rank++)                                                  \
            memcpy(&factors[rank], scalars[rank], sizeof factors[rank]);                           \
        for (size_t i = 0; i < count; i++) {                                                       \
            type reduced = ((const type *)inputs[0])[i];                                           \
            if (op == PREMUL)                                                                      \
                reduced = (type)((wide)reduced * (wide)factors[0]);                                \
            for (int rank = 1; rank < nranks; rank++) {                                            \
                type value = ((const type *)inputs[rank])[i];                                      \
                switch (op) {                                                                      \
                case ncclProd: reduced = (type)((wide)reduced * (wide)value); break;               \
                case ncclMax: reduced = value > reduced ? value : reduced; break;                  \
                case ncclMin: reduced = value < reduced ? value : reduced; break;                  \
                case PREMUL:                                                                       \
                    reduced = (type)((wide)reduced + (wide)value * (wide)factors[rank]);           \
                    break;                                                                         \
                default: reduced = (type)((wide)reduced + (wide)value); break;                     \
                }                                                                                  \
            }                                                                                      \
            ((type *)result)[i] = op == ncclAvg ? (type)(reduced / (type)nranks) : reduced;        \
        }                                                                                          \
    }
INTEGERS(int8, int8_t, uint64_t)
INTEGERS(uint8, uint8_t, uint64_t)
INTEGERS(int32, int32_t, uint64_t)
INTEGERS(uint32, uint32_t, uint64_t)
INTEGERS(int64, int64_t, uint64_t)
INTEGERS(uint64, uint64_t, uint64_t)

#define LOAD_SAME(at, i) ((at)[i])
#define STORE_SAME(value) (value)
#define FLOATS(name, type, wide, LOAD, STORE, MAX, MIN)                                            \
    static void reduce_##name(int op, void *result, void *const *inputs, int nranks,               \
                              size_t count, unsigned char (*scalars)[8])                           \
    {                                                                                              \
        wide factors[MAX_RANKS];                                                                   \
        bool multiplies = op == ncclAvg || op == PREMUL;                                           \
        for (int rank = 0; rank < nranks; rank++)                                                  \
            factors[rank] = op == PREMUL ? LOAD((const type *)scalars[rank], 0)                    \
                                         : (wide)1 / (wide)nranks;                                 \
        for (size_t i = 0; i < count; i++) {                                                       \
            wide reduced = LOAD((const type *)inputs[0], i);                                       \
            if (multiplies)                                                                        \
                reduced *= factors[0];                                                             \
            for (int rank = 1; rank < nranks; rank++) {                                            \
                wide value = LOAD((const type *)inputs[rank], i);                                  \
                switch (op) {                                                                      \
                case ncclProd: reduced *= value; break;                                            \
                case ncclMax: reduced = MAX(reduced, value); break;                                \
                case ncclMin: reduced = MIN(reduced, value); break;                                \
                default: reduced += multiplies ? value * factors[rank] : value; break;             \
                }                                                                                  \
            }                                                                                      \
            ((type *)result)[i] = (type)STORE(reduced);                                            \
        }                                                                                          \
    }
FLOATS(float32, float, float, LOAD_SAME, STORE_SAME, fmaxf, fminf)
FLOATS(float64, double, double, LOAD_SAME, STORE_SAME, fmax, fmin)
#define SMALL(name, type, LAYOUT)                                                                  \
    static inline float load_##name(const type *at, size_t i)                                      \
    {                                                                                              \
        return decode(at[i], LAYOUT);                                                              \
    }                                                                                              \
    static inline unsigned store_##name(float value)                                               \
    {                                                                                              \
        return encode(value, LAYOUT);                                                              \
    }                                                                                              \
    FLOATS(name, type, float, load_##name, store_##name, fmaxf, fminf)
SMALL(float16, uint16_t, HALF)
SMALL(bfloat16, uint16_t, BRAIN)
SMALL(float8e4m3, uint8_t, E4M3)
SMALL(float8e5m2, uint8_t, E5M2)

void reduce(const call *of, void *result, void *const *inputs, int nranks, size_t count,
            unsigned char (*scalars)[8])
{
    int op = of->op >= ncclNumOps ? PREMUL : of->op;
    static void (*const by_type[ncclNumTypes])(int, void *, void *const *, int, size_t,
                                               unsigned char (*)[8]) = {
        reduce_int8,    reduce_uint8,   reduce_int32,    reduce_uint32,     reduce_int64,
        reduce_uint64,  reduce_float16, reduce_float32,  reduce_float64,    reduce_bfloat16,
        reduce_float8e4m3, reduce_float8e5m2};
    by_type[of->datatype](op, result, inputs, nranks, count, scalars);
}
