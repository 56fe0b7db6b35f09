/* Every kernel for one number type and one format of weights; the reduced formats only run forward.
   target.c includes this for each. */
#include "vector.h"
#include "gate_math.h"
#include "weights.h"
#include "product.h"
#include "forward.h"
#if FORMAT == FULL
#include "backward.h"
#include "outer.h"
#include "dense.h"
#include "rows.h"
#include "updates.h"
#endif

const recur_table JOIN(NAME(recur_table_), JOIN(_, RECUR_TARGET)) = {
    .name = TEXT(RECUR_TARGET),
    .lanes = (int)LANES,
    .item = sizeof(REAL),
    .panels = NAME(panels),
    .panel_width = NAME(panel_width),
    .pack = NAME(pack),
    .weights_size = NAME(weights_size),
    .pack_weights = NAME(pack_weights),
    .unpack = NAME(unpack),
    .product = NAME(product),
    .forward = NAME(forward),
    .map = NAME(map),
    .exp = NAME(map_exp),
#if FORMAT == FULL
    .backward = NAME(backward),
    .softmax_cross_entropy = NAME(softmax_cross_entropy),
    .outer = NAME(outer),
    .outer_scratch = NAME(outer_scratch),
    .dense = NAME(dense),
    .dense_scratch = NAME(dense_scratch),
    .sum_rows = NAME(sum_rows),
    .sum_squares = NAME(sum_squares),
    .descent = NAME(descent),
    .momentum = NAME(momentum),
    .adam = NAME(adam),
#endif
};

#undef LANES
#undef VREAL
#undef VINT
#undef VUINT
#undef MANTISSA_BITS
#undef EXPONENT_BIAS
#undef ROUNDING
#undef LOG2_E
#undef LN2_HIGH
#undef LN2_LOW
#undef EXP_OVERFLOWS
#undef EXP_VANISHES
#undef TANH_SATURATES
#undef SPLAT
#undef SIGN_BIT
#undef LIFT
#undef TILE_NAME
#undef TILE
#undef DEPTH_BLOCK
#undef STRIP_TILE
#undef ROW_BLOCK
#undef MAX_VECTORS
#undef LINE
#undef WEIGHT
#undef SCALES
#undef PART_OF_WORD
#undef HIGH_BYTE
#undef HIGH_HALF
