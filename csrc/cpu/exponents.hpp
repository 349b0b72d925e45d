// Exponential functions of single numbers in doubles, the same bits everywhere: those of libraries differ in the last.
#pragma once

#include <cmath>

namespace cpu {

// e^x, a few units in the last place off. Built without contraction of products and sums.
inline double exp_of(double x) {
  if (!(x > -700.0)) return x == x ? 0.0 : x;
  if (x > 700.0) return INFINITY;
  const double n = std::floor(x * 0x1.71547652b82fep+0 + 0.5);
  const double r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;
  double sum = 1.0;
  for (int term = 14; term > 0; --term) sum = sum * r / term + 1.0;
  return std::ldexp(sum, static_cast<int>(n));
}

// The natural logarithm of a positive finite number.
inline double log_of(double x) {
  int power = 0;
  double m = std::frexp(x, &power);
  if (m < 0x1.6a09e667f3bcdp-1) m *= 2.0, --power;
  const double s = (m - 1.0) / (m + 1.0), squared = s * s;
  double sum = 0.0;
  for (int term = 23; term > 0; term -= 2) sum = sum * squared + 1.0 / term;
  return 2.0 * s * sum + power * 0x1.62e42fefa39efp-1;
}

inline double sigmoid_of(double x) { return 1.0 / (1.0 + exp_of(-x)); }
inline double softplus_of(double x) { return x > 30.0 ? x : log_of(1.0 + exp_of(x)); }

}  // namespace cpu
