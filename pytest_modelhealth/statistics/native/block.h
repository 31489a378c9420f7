/* What is done with one block of finite or other values; included once for each REAL.
 *
 * Sums run in LANES separate lanes whose order is fixed here and not by the compiler, so that every
 * CPU gives the same bits. The loops over lanes are what compilers turn into vector instructions.
 */

typedef struct {
    double mean, deviations; /* mean, sum of squared deviations from it */
    int64_t zeros;
    REAL low, high;
} NAME(Block);

static inline REAL NAME(lesser)(REAL a, REAL b) { return a < b ? a : b; }
static inline REAL NAME(greater)(REAL a, REAL b) { return a > b ? a : b; }

/* One pass over `count` values, deviations taken from `pivot`; false where one is not finite. */
static bool NAME(summarize_block)(const REAL *values, int64_t count, double pivot,
                                  NAME(Block) *block) {
    double sums[LANES] = {0}, squares[LANES] = {0};
    int32_t zeros[LANES] = {0};
    REAL low[LANES], high[LANES];
    int64_t start = 0;
    for (int lane = 0; lane < LANES; lane++) low[lane] = high[lane] = values[0];
    for (; start + LANES <= count; start += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            REAL value = values[start + lane];
            double deviation = value - pivot;
            sums[lane] += deviation;
            squares[lane] += deviation * deviation;
            zeros[lane] += value == 0;
            low[lane] = NAME(lesser)(value, low[lane]);
            high[lane] = NAME(greater)(value, high[lane]);
        }
    }
    for (int lane = 0; start + lane < count; lane++) {
        REAL value = values[start + lane];
        double deviation = value - pivot;
        sums[lane] += deviation;
        squares[lane] += deviation * deviation;
        zeros[lane] += value == 0;
        low[lane] = NAME(lesser)(value, low[lane]);
        high[lane] = NAME(greater)(value, high[lane]);
    }
    for (int half = LANES / 2; half; half /= 2) {
        for (int lane = 0; lane < half; lane++) {
            sums[lane] += sums[lane + half];
            squares[lane] += squares[lane + half];
            zeros[lane] += zeros[lane + half];
            low[lane] = NAME(lesser)(low[lane], low[lane + half]);
            high[lane] = NAME(greater)(high[lane], high[lane + half]);
        }
    }
    double shift = sums[0] / (double)count;
    block->mean = pivot + shift;
    block->deviations = squares[0] - sums[0] * shift;
    if (!(block->deviations > 0)) block->deviations = 0; /* rounding of a constant */
    block->zeros = zeros[0];
    block->low = low[0];
    block->high = high[0];
    return isfinite(sums[0]);
}

/* Count what is not finite; copy the rest to `finite` and return how many that are. */
static int64_t NAME(take_finite)(const REAL *values, int64_t count, REAL *finite, Summary *summary) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        REAL value = values[i];
        if (isfinite(value)) finite[kept++] = value;
        else if (isnan(value)) summary->nans++;
        else if (value > 0) summary->positive_infs++;
        else summary->negative_infs++;
    }
    return kept;
}

/* Chan, Golub and LeVeque 1979, as in moments.py. */
static void NAME(add_block)(Summary *summary, const NAME(Block) *block, int64_t count) {
    double gap = block->mean - summary->mean;
    double part = (double)count / (double)(summary->finite + count);
    summary->mean += gap * part;
    summary->deviations += block->deviations + gap * gap * ((double)summary->finite * part);
    summary->finite += count;
    summary->zeros += block->zeros;
    if (block->low < summary->low) summary->low = block->low;
    if (block->high > summary->high) summary->high = block->high;
}

/* Lower *low to the least of `lows` and raise *high to the greatest of `highs`. */
static void NAME(run_extremes)(const REAL *lows, const REAL *highs, int64_t count, REAL *low,
                               REAL *high) {
    REAL least[LANES], most[LANES];
    int64_t start = 0;
    if (count >= LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            least[lane] = lows[0];
            most[lane] = highs[0];
        }
        for (; start + LANES <= count; start += LANES) {
            for (int lane = 0; lane < LANES; lane++) {
                least[lane] = NAME(lesser)(lows[start + lane], least[lane]);
                most[lane] = NAME(greater)(highs[start + lane], most[lane]);
            }
        }
        for (int half = LANES / 2; half; half /= 2) {
            for (int lane = 0; lane < half; lane++) {
                least[lane] = NAME(lesser)(least[lane], least[lane + half]);
                most[lane] = NAME(greater)(most[lane], most[lane + half]);
            }
        }
        *low = NAME(lesser)(least[0], *low);
        *high = NAME(greater)(most[0], *high);
    }
    for (; start < count; start++) {
        *low = NAME(lesser)(lows[start], *low);
        *high = NAME(greater)(highs[start], *high);
    }
}

static void NAME(column_extremes)(const REAL *restrict values, int64_t count, REAL *restrict low,
                                  REAL *restrict high) {
    for (int64_t i = 0; i < count; i++) {
        low[i] = NAME(lesser)(values[i], low[i]);
        high[i] = NAME(greater)(values[i], high[i]);
    }
}

/* Four rows at a time: `low` and `high` are read and written a quarter as often. */
static void NAME(four_rows)(const REAL *restrict values, int64_t columns, REAL *restrict low,
                            REAL *restrict high) {
    const REAL *first = values, *second = first + columns, *third = second + columns,
               *fourth = third + columns;
    for (int64_t i = 0; i < columns; i++) {
        REAL a = first[i], b = second[i], c = third[i], d = fourth[i];
        REAL least = NAME(lesser)(NAME(lesser)(a, b), NAME(lesser)(c, d));
        REAL most = NAME(greater)(NAME(greater)(a, b), NAME(greater)(c, d));
        low[i] = NAME(lesser)(least, low[i]);
        high[i] = NAME(greater)(most, high[i]);
    }
}

/* The slow way for a block with NaNs: a unit that had one keeps NaN for good. */
static void NAME(careful_extremes)(const REAL *values, int64_t count, int64_t position,
                                   const Units *units, REAL *low, REAL *high) {
    for (int64_t i = 0; i < count; i++) {
        int64_t cell = (position + i) / units->run % units->cells;
        REAL value = values[i];
        if (isnan(value) || isnan(low[cell])) {
            low[cell] = high[cell] = (REAL)NAN;
        } else {
            low[cell] = NAME(lesser)(value, low[cell]);
            high[cell] = NAME(greater)(value, high[cell]);
        }
    }
}

/* Add the values to the extremes of their units: NaN compares false, so it stays where it is. */
static void NAME(unit_extremes)(const REAL *values, int64_t count, int64_t position,
                                const Units *units, REAL *low, REAL *high) {
    int64_t run = units->run, cells = units->cells, cell = position / run % cells;
    if (run == 1) {
        while (count) {
            if (!cell && count >= 4 * cells) {
                NAME(four_rows)(values, cells, low, high);
                values += 4 * cells;
                count -= 4 * cells;
                continue;
            }
            int64_t length = cells - cell < count ? cells - cell : count;
            NAME(column_extremes)(values, length, low + cell, high + cell);
            values += length;
            count -= length;
            cell = 0;
        }
        return;
    }
    int64_t left = run - position % run;
    while (count) {
        int64_t length = left < count ? left : count;
        NAME(run_extremes)(values, values, length, low + cell, high + cell);
        values += length;
        count -= length;
        left = run;
        cell = cell + 1 == cells ? 0 : cell + 1;
    }
}

static void NAME(count_exponents)(const REAL *values, int64_t count, Counts counts) {
    int64_t start = 0;
    for (; start + TABLES <= count; start += TABLES)
        for (int table = 0; table < TABLES; table++)
            counts[table][NAME(row)(values[start + table])]++;
    for (; start < count; start++) counts[0][NAME(row)(values[start])]++;
}

/* Read all blocks of a tensor; `low` and `high` are the cells' extremes, or NULL. */
static void NAME(reduce)(const Tensor *tensor, const Units *units, int64_t one_in, Counts counts,
                         REAL *low, REAL *high, Summary *summary) {
    REAL copied[BLOCK], finite[BLOCK];
    uint64_t random = 0x9E3779B97F4A7C15; /* the same windows in every tensor of one size */
    double pivot = 0;
    for (int64_t at = 0, count; at < tensor->count; at += count) {
        count = block_length(units, at);
        if (count > tensor->count - at) count = tensor->count - at;
        const REAL *values = NAME(load)(tensor, at, count, copied);
        NAME(Block) block;
        if (!at && isfinite(values[0])) pivot = values[0];
        bool all_finite = NAME(summarize_block)(values, count, pivot, &block);
        if (low && !all_finite) {
            NAME(careful_extremes)(values, count, at, units, low, high);
        } else if (low && at % units->run + count <= units->run) {
            int64_t cell = at / units->run % units->cells;
            low[cell] = NAME(lesser)(block.low, low[cell]);
            high[cell] = NAME(greater)(block.high, high[cell]);
        } else if (low) {
            NAME(unit_extremes)(values, count, at, units, low, high);
        }
        int64_t kept = count;
        if (!all_finite) {
            kept = NAME(take_finite)(values, count, finite, summary);
            values = finite;
            if (!kept) continue;
            NAME(summarize_block)(values, kept, values[0], &block);
        }
        NAME(add_block)(summary, &block, kept);
        pivot = block.mean;
        int64_t window = (kept + one_in - 1) / one_in;
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        values += (int64_t)((random >> 32) % (uint64_t)(kept - window + 1));
        NAME(count_exponents)(values, window, counts);
        summary->sampled += window;
    }
}

/* Fold cells to units, `cells / count` of them each, widened to double. */
static void NAME(fold)(const REAL *low, const REAL *high, const Units *units, double *unit_low,
                       double *unit_high) {
    int64_t width = units->cells / units->count, ill = 0;
    for (int64_t cell = 0; cell < units->cells; cell++) ill += low[cell] != low[cell];
    for (int64_t unit = 0; unit < units->count; unit++) {
        const REAL *lows = low + unit * width, *highs = high + unit * width;
        REAL least = lows[0], most = highs[0];
        NAME(run_extremes)(lows, highs, width, &least, &most);
        for (int64_t i = 0; ill && i < width; i++)
            if (isnan(lows[i])) least = most = (REAL)NAN;
        unit_low[unit] = least;
        unit_high[unit] = most;
    }
}

static void NAME(run)(const Tensor *tensor, const Units *units, int64_t one_in, Counts counts,
                      Summary *summary, void *cells, double *unit_low, double *unit_high) {
    if (!unit_low) {
        NAME(reduce)(tensor, units, one_in, counts, NULL, NULL, summary);
        return;
    }
    REAL *low = cells, *high = low + (units->cells + 15) / 16 * 16; /* aligned for vectors */
    for (int64_t cell = 0; cell < units->cells; cell++) {
        low[cell] = INFINITY;
        high[cell] = -INFINITY;
    }
    NAME(reduce)(tensor, units, one_in, counts, low, high, summary);
    if (units->cells > units->count) {
        NAME(fold)(low, high, units, unit_low, unit_high);
        return;
    }
    for (int64_t unit = 0; unit < units->count; unit++) {
        unit_low[unit] = low[unit];
        unit_high[unit] = high[unit];
    }
}
