#include <algorithm>

#include "benchmarks/kernels/elementwise.h"
#include "optim/state_layout.h"
#include "optim/step.h"

namespace ballast::benchmarks {
namespace {

// Returns the bytes that one step has to move for an element, read and written together.
double bytes_of_an_element(StateFormat format, DType gradient) {
  const double state = static_cast<double>(8 * master_bytes(format) + 2 * moment_bits(format)) / 8;
  // A remainder is of no use without its parameter, which is therefore read as well as written.
  const double parameter = format == StateFormat::fp32 ? 2 : 4;
  const double scales = has_scales(format) ? 2.0 * 2 * sizeof(float) / group_size : 0;
  return static_cast<double>(byte_size(gradient)) + parameter + 2 * state + scales;
}

}  // namespace

Subject adamw(const std::shared_ptr<Place>& place, StateFormat format, std::size_t elements, std::size_t most_of_tile,
              Gradients gradients) {
  const std::size_t tile = std::min(most_of_tile, elements), count = elements / tile;
  const optim::StateLayout layout({.format = format, .parameter = DType::bf16, .names = optim::AdamW::state}, tile);
  const std::size_t gradient_bytes = byte_size(gradients.dtype);
  if (!gradients.memory) gradients.memory = place->memory(count * tile * gradient_bytes);
  const auto parameter = place->memory(count * tile * 2);
  const auto state = place->memory(count * layout.bytes());
  const kernels::GroupStep group = optim::at(optim::AdamW{}, {.number = 1});
  const auto bytes =
      static_cast<std::size_t>(bytes_of_an_element(format, gradients.dtype) * static_cast<double>(count * tile));
  return place->moving(bytes, [=] {
    for (std::size_t i = 0; i < count; ++i) {
      TileMemory memory = layout.tile(state.get() + i * layout.bytes());
      memory.parameter = parameter.get() + i * tile * 2;
      memory.gradient = gradients.memory.get() + i * tile * gradient_bytes;
      memory.gradient_dtype = gradients.dtype;
      memory.count = tile;
      memory.first_index = i * tile;
      const kernels::Run run{.begin = 0, .count = tile, .group = 0};
      place->backend().update(memory, {&run, 1}, {&group, 1});
    }
  });
}

}  // namespace ballast::benchmarks
