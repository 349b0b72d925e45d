// a * b + c rounded once, for sets that have no such instruction.
//
// Doubles hold a product of floats exactly. Their sum with c is rounded to odd: where it is not exact, the last bit is set,
// so that rounding it once more, to float, sees on which side of a tie the exact sum lies.

typedef double vd __attribute__((vector_size(8 * W)));
typedef int64_t vl __attribute__((vector_size(8 * W)));

CPU_INLINE vf fused_by_doubles(vf a, vf b, vf c) {
  const vd product = __builtin_convertvector(a, vd) * __builtin_convertvector(b, vd), added = __builtin_convertvector(c, vd);
  const vd sum = product + added;
  const vd of_added = sum - product, of_product = sum - of_added;
  const vd rest = (product - of_product) + (added - of_added);  // exact; NaN where the sum is not finite
  const vl higher = rest > 0.0, inexact = higher | (rest < 0.0);
  const vl away_from_zero = higher ^ (sum < 0.0);
  const vl even = ((vl)sum & 1) - 1;
  const vl odd_neighbour = ~(away_from_zero << 1);  // 1 or -1 units in the last place
  return __builtin_convertvector((vd)((vl)sum + (inexact & even & odd_neighbour)), vf);
}
