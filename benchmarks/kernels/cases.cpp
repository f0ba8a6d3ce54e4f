#include "benchmarks/kernels/cases.h"

#include <fmt/format.h>

#include "benchmarks/kernels/adamw.h"

namespace ballast::benchmarks {
namespace {

using kernels::StateFormat;

using Make = Subject (*)(StateFormat, const Setting&);

Subject copy_of_the_same_bytes(const Setting& setting, double gigabytes) {
  return setting.limits.copy(setting.copy, static_cast<std::size_t>(gigabytes * 1e9));
}

Subject scale_of_the_same_bytes(const Setting& setting, double gigabytes) {
  return setting.limits.scale(static_cast<std::size_t>(gigabytes * 1e9));
}

void beside_copy(std::vector<Case>& cases, std::string name, std::function<Subject(const Setting&)> make) {
  cases.push_back({std::move(name), "copy", std::move(make), copy_of_the_same_bytes});
}

void beside_scale(std::vector<Case>& cases, std::string name, std::function<Subject(const Setting&)> make) {
  cases.push_back({std::move(name), "scale in place", std::move(make), scale_of_the_same_bytes});
}

auto in_format(Make make, StateFormat format) {
  return [=](const Setting& setting) { return make(format, setting); };
}

// The table: a new case is a line here.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const StateFormat format : kernels::all_state_formats) {
    beside_copy(all, fmt::format("adamw {}, whole", name(format)), in_format(adamw, format));
    beside_scale(all, fmt::format("adamw {}, whole", name(format)), in_format(adamw, format));
    beside_copy(all, fmt::format("adamw {}, 2^n elements", name(format)), in_format(adamw_power_of_two, format));
    beside_copy(all, fmt::format("adamw {}, tiles", name(format)), in_format(adamw_tiles, format));
    beside_copy(all, fmt::format("adamw {}, from cache", name(format)), in_format(adamw_from_cache, format));
  }
  return all;
}

}  // namespace

Suite kernels_suite() {
  return {.name = "kernels",
          .description = "Kernels on the CPU beside what the memory allows",
          .most_bytes_of_an_element = 28,
          .cases = cases()};
}

}  // namespace ballast::benchmarks
