// Casts to narrow formats, with or without scales, with error feedback; and back.
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

// Four values, or as many as are left: one access of 16 bytes where the address allows it.
struct Four {
    float at[4];
};
static __device__ __forceinline__ Four load_four(const float *source, u64 start, u64 count) {
    Four four = {{0, 0, 0, 0}};
    if (start + 4 <= count && (u64)source % 16 == 0) {
        float4 raw = ((const float4 *)source)[start / 4];
        four.at[0] = raw.x, four.at[1] = raw.y, four.at[2] = raw.z, four.at[3] = raw.w;
    } else {
        for (int lane = 0; lane < 4 && start + lane < count; lane++)
            four.at[lane] = source[start + lane];
    }
    return four;
}
static __device__ __forceinline__ void store_four(float *target, u64 start, u64 count, Four four) {
    if (start + 4 <= count && (u64)target % 16 == 0) {
        float4 raw = {four.at[0], four.at[1], four.at[2], four.at[3]};
        ((float4 *)target)[start / 4] = raw;
    } else {
        for (int lane = 0; lane < 4 && start + lane < count; lane++)
            target[start + lane] = four.at[lane];
    }
}

// The same of codes, which take 4 or 8 bytes.
template <class Code> struct Codes {
    union {
        u32 words[sizeof(Code)];
        Code at[4];
    };
};
template <class Code>
static __device__ __forceinline__ Codes<Code> load_codes(const u8 *codes, u64 start, u64 count) {
    Codes<Code> four;
    if (start + 4 <= count && (u64)codes % (4 * sizeof(Code)) == 0) {
        four = ((const Codes<Code> *)codes)[start / 4];
    } else {
        for (int lane = 0; lane < 4; lane++)
            four.at[lane] = start + lane < count ? ((const Code *)codes)[start + lane] : (Code)0;
    }
    return four;
}
template <class Code>
static __device__ __forceinline__ void store_codes(u8 *codes, u64 start, u64 count,
                                                   Codes<Code> four) {
    if (start + 4 <= count && (u64)codes % (4 * sizeof(Code)) == 0) {
        ((Codes<Code> *)codes)[start / 4] = four;
    } else {
        for (int lane = 0; lane < 4 && start + lane < count; lane++)
            ((Code *)codes)[start + lane] = four.at[lane];
    }
}

// Finds the largest finite magnitude of each block, as the bits of a float32; `peaks` are 0 before.
// With residuals, `source` plus `residual` takes the place of both.
KERNEL(peaks)(u32 *peaks, const float *source, float *residual, u64 count, u32 shift) {
    for (u64 start = 4 * first_thread(); start < count; start += 4 * all_threads()) {
        Four values = load_four(source, start, count);
        if (residual) {
            Four kept = load_four(residual, start, count);
            for (int lane = 0; lane < 4; lane++)
                values.at[lane] = with_residual(values.at[lane], kept.at[lane]);
            store_four(residual, start, count, values);
        }
        u32 most = 0;
        u64 block = start >> shift;
        for (int lane = 0; lane < 4 && start + lane < count; lane++) {
            u32 size = __float_as_uint(values.at[lane]) & 0x7fffffffu;
            if ((start + lane) >> shift != block) {  // blocks of fewer than four values
                atomicMax(&peaks[block], most);
                most = 0;
                block = (start + lane) >> shift;
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
    for (u64 start = 4 * first_thread(); start < count; start += 4 * all_threads()) {
        Four kept = {{0, 0, 0, 0}}, values;
        if (residual) kept = load_four(residual, start, count);
        values = residual && shift != NO_BLOCKS ? kept : load_four(source, start, count);
        Codes<Code> made;
        for (int lane = 0; lane < 4 && start + lane < count; lane++) {
            float value = values.at[lane], down = 1, up = 1;
            u64 at = start + lane;
            if (shift != NO_BLOCKS) {  // `peaks` has added the residual
                u64 block = at >> shift;
                u32 scale = scale_of<F>(peaks[block]);
                if (at == block << shift) scales[block] = (u8)scale;
                down = __uint_as_float((254 - scale) << 23);
                up = __uint_as_float(scale << 23);
            } else if (residual) {
                value = with_residual(value, kept.at[lane]);
            }
            bool lost;
            u32 code = F::narrow(value * down, &lost);
            if (lost) {
                large++;
                if (saturate) code -= F::TOP - F::LARGEST;
            }
            made.at[lane] = (Code)code;
            float error = value - F::widen(code) * up;
            if (residual && !is_finite(error)) {
                error = 0;
                dropped++;
            }
            kept.at[lane] = error;
        }
        store_codes<Code>(codes, start, count, made);
        if (residual) store_four(residual, start, count, kept);
    }
    if (large) atomicAdd(&tally[0], large);
    if (dropped) atomicAdd(&tally[1], dropped);
}

// Four decoded values.
template <class F, class Code>
static __device__ __forceinline__ Four decoded(const u8 *codes, u64 start, u64 count, u32 shift) {
    Codes<Code> given = load_codes<Code>(codes, start, count);
    Four values = {{0, 0, 0, 0}};
    for (int lane = 0; lane < 4 && start + lane < count; lane++) {
        values.at[lane] = F::widen(given.at[lane]);
        if (shift != NO_BLOCKS) {
            u32 scale = codes[count * sizeof(Code) + ((start + lane) >> shift)];
            values.at[lane] *= __uint_as_float(scale << 23);
        }
    }
    return values;
}

template <class F, class Code>
static __device__ __forceinline__ void decode(float *target, const u8 *codes, u64 count, u32 shift) {
    for (u64 start = 4 * first_thread(); start < count; start += 4 * all_threads())
        store_four(target, start, count, decoded<F, Code>(codes, start, count, shift));
}

// Adds up what ranks have sent, in their order, with the own values as they are.
template <class F, class Code>
static __device__ __forceinline__ void add_up(float *total, Sources come, const float *own,
                                              u32 ranks, u32 index, float divisor, u64 count,
                                              u32 shift) {
    for (u64 start = 4 * first_thread(); start < count; start += 4 * all_threads()) {
        Four sum = {{0, 0, 0, 0}};
        for (u32 rank = 0; rank < ranks; rank++) {
            Four values =
                rank == index ? load_four(own, start, count)
                              : decoded<F, Code>((const u8 *)come.at[rank], start, count, shift);
            for (int lane = 0; lane < 4; lane++)
                sum.at[lane] = rank ? sum.at[lane] + values.at[lane] : values.at[lane];
        }
        if (divisor != 1)
            for (int lane = 0; lane < 4; lane++) sum.at[lane] /= divisor;
        store_four(total, start, count, sum);
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
