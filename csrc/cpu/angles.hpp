// Cosine and sine of a float, the same bits everywhere: those of libraries differ in the last.
#pragma once

#include <cmath>
#include <initializer_list>

namespace cpu {

struct Turn {
  float cosine, sine;
};

// Return both, rounded correctly but where a double is too close to a tie to tell, once in some 10^8 times. Built without
// contraction of products and sums.
inline Turn turn_by(float angle) {
  // A quarter of a turn in pieces of 26 bits, so that each times up to 2^27 quarters is exact. Where a float's neighbours
  // are whole turns apart, any turn is as good as another, but is the same one.
  constexpr double kQuarter[] = {0x1.921fb5p+0, 0x1.110b46p-26, 0x1.1a6263p-54, 0x1.8a2e03p-81};
  constexpr double kFar = 0x1p27;
  const double given = static_cast<double>(angle);
  const double x = std::fabs(given) <= kFar ? given : std::fmod(given, 0x1.921fb54442d18p+2);
  const double quarters = std::floor(x * 0x1.45f306dc9c883p-1 + 0.5);
  double r = x;
  for (const double piece : kQuarter) r -= quarters * piece;
  const double s = r * r;
  // Taylor's polynomials: the next terms are below 2^-53 of the results
  double sine = -1.0 / 1307674368000.0, cosine = 1.0 / 20922789888000.0;
  for (const double term : {6227020800.0, -39916800.0, 362880.0, -5040.0, 120.0, -6.0}) sine = sine * s + 1.0 / term;
  for (const double term : {-87178291200.0, 479001600.0, -3628800.0, 40320.0, -720.0, 24.0}) cosine = cosine * s + 1.0 / term;
  sine = sine * s * r + r;
  cosine = (cosine * s - 0.5) * s + 1.0;
  const double place = quarters - 4.0 * std::floor(quarters / 4.0);
  const bool odd = place == 1.0 || place == 3.0;
  const double across = odd ? sine : cosine, along = odd ? cosine : sine;
  return {static_cast<float>(place == 1.0 || place == 2.0 ? -across : across), static_cast<float>(place >= 2.0 ? -along : along)};
}

}  // namespace cpu
