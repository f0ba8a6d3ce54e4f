#include "examples/gpt/multiply.h"

namespace ballast::gpt {

struct Multiplier::Parts {};

Multiplier::Multiplier() = default;

Multiplier::~Multiplier() = default;

std::string Multiplier::library() const { return "plain C++ (built without oneDNN)"; }

void Multiplier::operator()(const Product& product) const { multiply_portable(product); }

}  // namespace ballast::gpt
