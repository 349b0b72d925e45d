// a * b + c as the set's `fused` computes it; a single number stands for a vector of it. Sums of products are written with
// it alone: where compilers may contract them, each does so in its own way.
CPU_INLINE vf spread(vf value) { return value; }
CPU_INLINE vf spread(float value) { return set(value); }
template <typename A, typename B, typename C>
CPU_INLINE vf mac(A a, B b, C c) {
  return fused(spread(a), spread(b), spread(c));
}

// exp of numbers from -87.3 to 88, a unit in the last place or two off; NaN stays NaN.
CPU_INLINE vf exponential_within(vf x) {
  const vf magic = set(12582912.0f), shifted = mac(x, 1.44269504f, magic), n = shifted - magic;
  vf r = mac(n, -0.693359375f, x);
  r = mac(n, 2.12194440e-4f, r);
  vf p = set(1.9875691500e-4f);
  p = mac(p, r, 1.3981999507e-3f);
  p = mac(p, r, 8.3334519073e-3f);
  p = mac(p, r, 4.1665795894e-2f);
  p = mac(p, r, 1.6666665459e-1f);
  p = mac(p, r, 5.0000001201e-1f);
  p = mac(p, r * r, r) + 1.0f;
  return p * as_floats((as_bits(shifted) << 23) + 0x3F800000u);  // by 2^n, whose n ends the bits of `shifted`
}

// The same of what is at most 88, and of any number, with larger ones as 88 and smaller ones as -87.3.
CPU_INLINE vf exponential_of_least(vf x) { return exponential_within(greater(set(-87.3f), x)); }
CPU_INLINE vf exponential(vf x) { return exponential_of_least(x > set(88.0f) ? set(88.0f) : x); }
