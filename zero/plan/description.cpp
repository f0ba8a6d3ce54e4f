#include "zero/plan/description.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "offload/checksum.h"

namespace ballast {
namespace {

constexpr std::string_view tiles_begin = "tiles of ";

std::string stage_of(const Placement& placement) {
  if (!placement.full_parameters) return "stage 3";
  if (placement.shards > 1) return "stage 1 or 2";
  return placement.replicas > 1 ? "stage 0" : "a stage below 3";  // stages below 3 are the same on one rank
}

std::string counted(std::size_t count, std::string_view one, std::string_view more) {
  return fmt::format("{} {}", count, count == 1 ? one : more);
}

// Replaces control characters: a name is any text, but a fact has to stay in one line.
std::string in_one_line(std::string name) {
  std::ranges::replace_if(
      name, [](unsigned char each) { return each < ' '; }, '?');
  return name;
}

std::string line_of(const Tensor& tensor, DType dtype, std::size_t number) {
  return fmt::format("{} {} {} [{}] {}", tensor.frozen ? "frozen parameter" : "parameter", number,
                     in_one_line(tensor.name), fmt::join(tensor.shape, ", "), name(dtype));
}

}  // namespace

std::vector<std::string> describe(const CompiledPlan& plan) {
  const Placement& placement = plan.placement();
  const std::vector<Unit>& units = plan.model().units;
  std::vector<std::string> lines{
      counted(placement.shards * placement.replicas, "rank", "ranks"),
      stage_of(placement),
      counted(placement.replicas, "copy of the state", "copies of the state"),
      fmt::format("the update rule {}", plan.rule()),
  };
  if (placement.parameter_replicas > 1)
    lines.push_back(fmt::format("{} copies of the parameters", placement.parameter_replicas));
  std::size_t parameters = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    for (const Tensor& tensor : units[i].tensors) {
      lines.push_back(line_of(tensor, units[i].dtype, ++parameters));
    }
    for (const Tie& tie : units[i].ties) {
      lines.push_back(fmt::format("parameter {} tied to {} of unit {}", in_one_line(tie.name),
                                  in_one_line(units[tie.unit].tensors[tie.tensor].name),
                                  in_one_line(units[tie.unit].name)));
    }
    const std::string unit = fmt::format("unit {} {}", i + 1, in_one_line(units[i].name));
    lines.push_back(fmt::format("state format {} of {}", name(plan.blocks().state(i, 0).format()), unit));
    lines.push_back(fmt::format("{}{} elements of {}", tiles_begin, plan.layout().units[i].tile_elements, unit));
  }
  return lines;
}

std::size_t largest_tile(std::span<const std::string> lines) {
  std::size_t largest = 0;
  for (const std::string& line : lines) {
    if (!line.starts_with(tiles_begin)) continue;
    std::size_t elements = 0;
    std::from_chars(line.data() + tiles_begin.size(), line.data() + line.size(), elements);
    largest = std::max(largest, elements);
  }
  return largest;
}

std::uint64_t digest_of(std::span<const std::string> lines) {
  std::uint64_t digest = 0;
  for (const std::string& line : lines) {
    digest = offload::checksum(std::as_bytes(std::span(line)), digest);
  }
  return digest;
}

std::optional<Difference> first_difference(std::span<const std::string> one, std::span<const std::string> other) {
  const auto [in_one, in_other] = std::ranges::mismatch(one, other);
  if (in_one == one.end() && in_other == other.end()) return {};
  const auto line = [](auto found, auto end) { return found == end ? std::string("nothing more") : *found; };
  return Difference{line(in_one, one.end()), line(in_other, other.end())};
}

}  // namespace ballast
