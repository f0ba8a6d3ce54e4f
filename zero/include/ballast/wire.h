// The formats in which ranks send values to each other.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ballast {

// Exact: the format that the values have. Else codes of 8 or 4 bits, and an fp32 scale for each group of 128 values.
enum class WireFormat : std::uint8_t { exact, int8, int4 };

constexpr std::string_view name(WireFormat format) {
  constexpr std::string_view names[] = {"exact", "int8", "int4"};
  return names[static_cast<std::size_t>(format)];
}

// See docs/guides/slow-links.md. Gathers round to nearest, reductions stochastically, by random bits that depend on
// the step, the rank and the element. Norms, decisions and loading stay exact.
struct Wire {
  WireFormat gather = WireFormat::exact;  // of parameters, at stage 3; not int4
  WireFormat reduce = WireFormat::exact;  // of each rank's gradients
  // Of sums of several ranks' gradients: those of a host with several ranks, on their way to other hosts; those of a shard
  // group, on their way to its replicas; and at stage 0 the sum, on its way to all ranks. None: as `reduce`.
  std::optional<WireFormat> across{};

  WireFormat of_sums() const { return across.value_or(reduce); }
  bool operator==(const Wire&) const = default;
};

}  // namespace ballast
