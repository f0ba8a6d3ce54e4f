#include "optim/state_layout.h"

#include <algorithm>
#include <array>

#include "kernels/runtime/sizes.h"
#include "kernels/state_math.h"

namespace ballast::optim {
namespace {

constexpr std::size_t part_alignment = 64;  // a cache line, and four of CUDA's widest accesses
constexpr std::array<std::string_view, max_own_values> own_names{"own 0", "own 1", "own 2", "own 3",
                                                                 "own 4", "own 5", "own 6", "own 7"};

}  // namespace

StateLayout::StateLayout(const StateKind& kind, std::size_t elements) : kind_(kind), elements_(elements) {
  const bool has_momentum = !kind.names.momentum.empty();
  const bool has_variance = !kind.names.variance.empty();
  if (kind.parameter != DType::fp32) {  // an fp32 parameter is itself the master
    add("master", elements * master_bytes(kind.format));
  }
  if (has_momentum) add("momentum", moment_bytes(kind.format, elements));
  if (has_variance) add("variance", moment_bytes(kind.format, elements));
  if (has_scales(kind.format)) {
    const std::size_t scales = round_up(elements, group_size) / group_size * sizeof(float);
    if (has_momentum) add("momentum scales", scales);
    if (has_variance) add("variance scales", scales);
  }
  for (std::size_t number = 0; number < kind.names.own_values; ++number) {
    add(own_names.at(number), elements * sizeof(float));
  }
}

void StateLayout::add(std::string_view name, std::size_t bytes) {
  fields_.push_back({name, bytes_, bytes});
  bytes_ = round_up(bytes_ + bytes, part_alignment);
}

std::byte* StateLayout::at(std::byte* state, std::string_view name) const {
  const auto field = std::ranges::find(fields_, name, &StateField::name);
  return field == fields_.end() ? nullptr : state + field->offset;
}

std::vector<StateField> StateLayout::fields_of(std::size_t first, std::size_t count) const {
  const StateLayout before(kind_, first);
  std::vector<StateField> fields = layout_of(count).fields_;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    fields[i].offset = fields_[i].offset + before.fields_[i].bytes;
  }
  return fields;
}

// All arrays have the same size, so that they lie at equal distances.
OwnValues StateLayout::own_values(std::byte* state) const {
  const std::size_t count = kind_.names.own_values;
  if (count == 0) return {};
  const std::size_t bytes = round_up(elements_ * sizeof(float), part_alignment);
  return {reinterpret_cast<float*>(at(state, own_names[0])), bytes / sizeof(float), count};
}

TileMemory StateLayout::tile(std::byte* state) const {
  return {.format = kind_.format,
          .parameter_dtype = kind_.parameter,
          .master = at(state, "master"),
          .momentum = at(state, "momentum"),
          .variance = at(state, "variance"),
          .momentum_scales = reinterpret_cast<float*>(at(state, "momentum scales")),
          .variance_scales = reinterpret_cast<float*>(at(state, "variance scales")),
          .own = own_values(state),
          .count = elements_};
}

}  // namespace ballast::optim
