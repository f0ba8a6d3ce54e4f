// Ballast's AdamW behind a C interface, so that a Python script can run it in turn with others in one process, on
// memory that torch owns. It is for measurements only; the Python package does not use it.
#include <ballast/optim.h>

#include <string>

#include "kernels/backend.h"
#include "kernels/state_math.h"
#include "optim/step.h"

namespace {

using namespace ballast;

struct Handle {
  std::unique_ptr<kernels::Backend> backend;
  std::string problem{};
};

}  // namespace

extern "C" {

// Integers in the order of the enumerations StateFormat and DType.
struct BallastBenchTile {
  int format;
  int parameter_dtype;
  int gradient_dtype;
  void* parameter;
  const void* gradient;
  void* master;
  void* momentum;
  void* variance;
  float* momentum_scales;
  float* variance_scales;
  std::size_t count;
};

std::size_t ballast_bench_group_size() { return group_size; }

void* ballast_bench_open(int threads) { return new Handle{kernels::cpu_backend({.threads = threads})}; }

void ballast_bench_close(void* handle) { delete static_cast<Handle*>(handle); }

// Makes step `number`, counted from 1, with torch's default options. Returns null, or the error's text.
const char* ballast_bench_adamw(void* handle, const BallastBenchTile* tile, std::uint64_t number) {
  auto& self = *static_cast<Handle*>(handle);
  const auto bytes = [](void* memory) { return static_cast<std::byte*>(memory); };
  try {
    const TileMemory update{.format = static_cast<StateFormat>(tile->format),
                            .parameter_dtype = static_cast<DType>(tile->parameter_dtype),
                            .gradient_dtype = static_cast<DType>(tile->gradient_dtype),
                            .parameter = bytes(tile->parameter),
                            .gradient = static_cast<const std::byte*>(tile->gradient),
                            .master = bytes(tile->master),
                            .momentum = bytes(tile->momentum),
                            .variance = bytes(tile->variance),
                            .momentum_scales = tile->momentum_scales,
                            .variance_scales = tile->variance_scales,
                            .count = tile->count,
                            .rounding_stream = number};
    const kernels::Run run{.begin = 0, .count = tile->count, .group = 0};
    const auto group = optim::at(optim::AdamW{}, {.number = number});
    self.backend->update(update, {&run, 1}, {&group, 1});
    return nullptr;
  } catch (const std::exception& problem) {
    self.problem = problem.what();
    return self.problem.c_str();
  }
}

}  // extern "C"
