// The expected results of an update, in doubles, written from the definitions of torch.optim's rules and of the state
// formats (kernels/README.md). Nothing here uses the formulas under test.
#pragma once

#include "kernels/update.h"

namespace ballast::kernels {

struct Element {
  double parameter = 0;
  double momentum = 0;
  double variance = 0;
};

// A step's exact results, and the summed sizes of their terms, against which rounding errors are measured.
struct ExactStep {
  Element value;
  Element size;
  double doubt = 0;  // the doubt about the parameter, if a sign cannot be told
};

double gradient_of(const TileMemory& tile, std::size_t i);
Element state_of(const TileMemory& tile, std::size_t i, const Rule& rule);  // 0 for a moment that the rule lacks
ExactStep exact_step(const Rule& rule, const Element& old, double gradient);

double bf16_value(std::uint16_t pattern);
double fp16_value(std::uint16_t pattern);
double ulp(double size);         // the distance between floats of this size
double coarse_ulp(double size);  // the distance between bf16 numbers of this size

// What a code of a format with scales stands for, before it is scaled.
double momentum_code(StateFormat format, std::uint8_t code);
double root_code(StateFormat format, std::uint8_t code);

bool has_momentum(const Rule& rule);
bool has_variance(const Rule& rule);

}  // namespace ballast::kernels
