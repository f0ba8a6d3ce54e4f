// What an update should do, in doubles and written from the definitions: of torch.optim's rules, of the state formats in
// kernels/README.md. Nothing here uses the formulas under test.
#pragma once

#include "kernels/update.h"

namespace ballast::kernels {

struct Element {
  double parameter = 0;
  double momentum = 0;
  double variance = 0;
};

// How large the terms were that a number is the sum of: what its rounding error is measured against.
struct ExactStep {
  Element value;
  Element size;
  double doubt = 0;  // of the parameter, where a sign cannot be told
};

double gradient_of(const UpdateTile& tile, std::size_t i);
Element state_of(const UpdateTile& tile, std::size_t i, const Rule& rule);  // what the rule has none of is 0
ExactStep exact_step(const Rule& rule, const Element& old, double gradient);

double bf16_value(std::uint16_t pattern);
double fp16_value(std::uint16_t pattern);
double ulp(double size);                  // the distance of the floats there
double coarse_ulp(double size);           // of the bf16 numbers there
double momentum_code(std::uint8_t code);  // of format compact, before it is scaled
double root_code(std::uint8_t code);

bool has_momentum(const Rule& rule);
bool has_variance(const Rule& rule);

}  // namespace ballast::kernels
