/* Whether all samples of a batch, the slices along the outermost dimension, hold equal values.
 *
 * Equal as torch.equal has it: a NaN differs from everything, zeros of both signs are equal. Samples
 * nearly always differ in their first values, so that most tensors are settled at once.
 */

enum { FEW = 64 }; /* values compared between two looks at whether any differed */

#define DEFINE_ROWS_ARE_EQUAL(NAME, TYPE, DIFFER)                                       \
    static bool NAME(const TYPE *first, int64_t rows, int64_t length) {                 \
        for (const TYPE *row = first + length; --rows > 0; row += length)               \
            for (int64_t start = 0; start < length; start += FEW) {                     \
                int64_t end = length - start < FEW ? length : start + FEW;              \
                int differ = 0;                                                         \
                for (int64_t i = start; i < end; i++) differ |= DIFFER(first[i], row[i]); \
                if (differ) return false;                                               \
            }                                                                           \
        return true;                                                                    \
    }

#define VALUES_DIFFER(one, other) ((one) != (other))
/* Halves by their bits: more than infinity is NaN, nothing but a sign is zero. */
#define HALVES_DIFFER(one, other, infinity)                                     \
    ((((one) != (other)) & ((((one) | (other)) & 0x7FFF) != 0)) | (((one) & 0x7FFF) > (infinity)))
#define BFLOATS_DIFFER(one, other) HALVES_DIFFER(one, other, 0x7F80)
#define FLOATS16_DIFFER(one, other) HALVES_DIFFER(one, other, 0x7C00)

DEFINE_ROWS_ARE_EQUAL(rows_are_equal_float, float, VALUES_DIFFER)
DEFINE_ROWS_ARE_EQUAL(rows_are_equal_double, double, VALUES_DIFFER)
DEFINE_ROWS_ARE_EQUAL(rows_are_equal_bfloat16, uint16_t, BFLOATS_DIFFER)
DEFINE_ROWS_ARE_EQUAL(rows_are_equal_float16, uint16_t, FLOATS16_DIFFER)

/* Compare `samples` slices of dense memory, each with the first. */
static bool samples_are_equal(const void *data, int dtype, int64_t samples, int64_t count) {
    int64_t length = count / samples;
    switch (dtype) {
    case FLOAT32: return rows_are_equal_float(data, samples, length);
    case FLOAT64: return rows_are_equal_double(data, samples, length);
    case BFLOAT16: return rows_are_equal_bfloat16(data, samples, length);
    default: return rows_are_equal_float16(data, samples, length);
    }
}
