// Measures CPU kernels, compared with what the memory allows. To add a case, add a line to one of the tables.
#include <fmt/format.h>

#include <cstring>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/kernels/elementwise.h"
#include "benchmarks/kernels/subjects.h"

namespace ballast::benchmarks {
namespace {

using Make = Subject (*)(StateFormat, const Setting&);

Subject copy_of_the_same_bytes(const Setting& setting, double gigabytes) {
  return setting.limits.copy(setting.copy, static_cast<std::size_t>(gigabytes * 1e9));
}

Subject scale_of_the_same_bytes(const Setting& setting, double gigabytes) {
  return setting.limits.scale(static_cast<std::size_t>(gigabytes * 1e9));
}

void versus_copy(std::vector<Case>& cases, std::string name, std::function<Subject(const Setting&)> make) {
  cases.push_back({std::move(name), "copy", std::move(make), copy_of_the_same_bytes});
}

void versus_scale(std::vector<Case>& cases, std::string name, std::function<Subject(const Setting&)> make) {
  cases.push_back({std::move(name), "scale in place", std::move(make), scale_of_the_same_bytes});
}

Subject read_of_the_same_bytes(const Setting& setting, double gigabytes) {
  return setting.limits.read(static_cast<std::size_t>(gigabytes * 1e9));
}

void versus_read(std::vector<Case>& cases, std::string name, std::function<Subject(const Setting&)> make) {
  cases.push_back({std::move(name), "read", std::move(make), read_of_the_same_bytes});
}

auto in_format(Make make, StateFormat format) {
  return [=](const Setting& setting) { return make(format, setting); };
}

// The tables: a new case is a line in one of them.
void optimizer_steps(std::vector<Case>& all) {
  for (const StateFormat format : all_state_formats) {
    versus_copy(all, fmt::format("adamw {}, whole", name(format)), in_format(adamw, format));
    versus_scale(all, fmt::format("adamw {}, whole", name(format)), in_format(adamw, format));
    versus_copy(all, fmt::format("adamw {}, 2^n elements", name(format)), in_format(adamw_power_of_two, format));
    versus_copy(all, fmt::format("adamw {}, tiles", name(format)), in_format(adamw_tiles, format));
    versus_copy(all, fmt::format("adamw {}, from cache", name(format)), in_format(adamw_from_cache, format));
  }
}

class Cpu : public Place {
 public:
  explicit Cpu(int threads) : backend_(kernels::cpu_backend({.threads = threads})) {}

  kernels::Backend& backend() override { return *backend_; }
  std::shared_ptr<std::byte> memory(std::size_t bytes) override {
    const auto made = std::make_shared<Buffer>(bytes);
    std::memset(made->data(), byte_of_values, bytes);
    return {made, made->data()};
  }
  void set(std::byte* memory, unsigned char byte, std::size_t bytes) override { std::memset(memory, byte, bytes); }
  Subject moving(std::size_t bytes, std::function<void()> issue) const override {
    return {.work = static_cast<double>(bytes) / 1e9, .run = std::move(issue)};
  }

 private:
  std::unique_ptr<kernels::Backend> backend_;
};

void elementwise(std::vector<Case>& all) {
  for (const ElementwiseCase& item : elementwise_cases()) {
    const auto add = item.against == "read" ? versus_read : versus_copy;
    add(all, item.name, [make = item.make](const Setting& setting) {
      return make(std::make_shared<Cpu>(setting.threads.count()), setting.elements);
    });
  }
}

void versus_library(std::vector<Case>& cases, const std::string& name, const ProductSizes& sizes) {
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    cases.push_back({.name = name,
                     .against = fmt::format("library, {}", ballast::name(dtype)),
                     .make = [=](const Setting&) { return product(sizes); },
                     .make_against = [=](const Setting&, double) { return product_by_library(sizes, dtype); },
                     .unit = "GFLOP/s"});
  }
}

void matrices(std::vector<Case>& all) {
  versus_library(all, "multiply 1024 x 1024 x 1024", {1024, 1024, 1024});
  versus_library(all, "multiply by the transpose, 1024 x 1024", {1024, 1024, 1024, true});
  for (const auto& [rows, columns] : {std::pair(1024, 1024), std::pair(1024, 4096)}) {
    const kernels::MatrixShape shape{static_cast<std::size_t>(rows), static_cast<std::size_t>(columns)};
    all.push_back({.name = fmt::format("orthogonalize {} x {}", rows, columns),
                   .against = "library, bf16",
                   .make = [=](const Setting&) { return orthogonalization(shape); },
                   .make_against = [=](const Setting&, double) { return orthogonalization_by_library(shape); },
                   .unit = "GFLOP/s"});
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  optimizer_steps(all);
  elementwise(all);
  matrices(all);
  return all;
}

Suite kernels_suite() {
  return {.name = "kernels",
          .description = "CPU kernels, compared with what the memory allows",
          .most_bytes_of_an_element = 28,
          .cases = cases()};
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  return ballast::benchmarks::run_suite(ballast::benchmarks::kernels_suite(), argc, argv);
}
