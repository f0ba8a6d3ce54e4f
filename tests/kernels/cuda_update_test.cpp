// The CUDA optimizer step against the CPU's, bit for bit. Also meant to run under compute-sanitizer.
#include <catch2/catch.hpp>

#include "kernels/backend.h"
#include "kernels/runtime/buffer.h"
#include "kernels/runtime/stream.h"
#include "tests/kernels/update_memory.h"

using namespace ballast;
using namespace ballast::kernels;

namespace {

using Sizes = std::vector<std::size_t>;

constexpr std::size_t block_bytes = std::size_t{512} << 20;

class OnGpu {
 public:
  void update(UpdateMemory& memory, const std::vector<Run>& runs, const std::vector<GroupStep>& groups) {
    const std::size_t bytes = memory.bytes().size();
    REQUIRE(bytes <= block_bytes);
    copy(block_.data(), memory.bytes().data(), bytes, stream_);
    backend_->update(memory.tile_at(block_.data()), runs, groups);
    copy(memory.bytes().data(), block_.data(), bytes, stream_);
    stream_.synchronize();
  }

  bool same(const UpdateShape& shape, const std::vector<Run>& runs, const std::vector<GroupStep>& groups) {
    UpdateMemory expected(shape);
    UpdateMemory got(shape);
    cpu_->update(expected.tile(), runs, groups);
    update(got, runs, groups);
    return got.bytes() == expected.bytes();
  }

 private:
  MemoryAccounts accounts_;
  Stream stream_;
  Buffer block_ = allocate(accounts_, {.kind = MemoryKind::device, .bytes = block_bytes, .owner = "test"});
  std::unique_ptr<Backend> backend_ = cuda_backend(stream_.handle());
  std::unique_ptr<Backend> cpu_ = cpu_backend();
};

std::string described(const UpdateShape& shape, const Rule& rule) {
  return fmt::format("{} {} {} rule {} count {} shift {}", name(shape.format), name(shape.parameter_dtype),
                     name(shape.gradient_dtype), rule.index(), shape.count, shape.shift);
}

}  // namespace

TEST_CASE("CUDA updates give the bits of the CPU, for every rule and format", "[gpu]") {
  OnGpu gpu;
  for (const StateFormat format : all_state_formats) {
    for (UpdateShape shape : sample_shapes(format)) {
      for (const Rule& rule : sample_rules()) {
        for (const std::size_t count : Sizes{0, 1, 7, 8, 9, 127, 128, 129, 1000, 1'000'003}) {
          for (const std::size_t shift : Sizes{0, 1}) {
            shape.count = count;
            shape.shift = shift;
            INFO(described(shape, rule));
            REQUIRE(gpu.same(shape, {{0, count, 0}}, {{.rule = rule, .gradient_factor = -0.37f}}));
          }
        }
      }
    }
  }
}

TEST_CASE("CUDA updates give the bits of the CPU, for every size", "[gpu]") {
  OnGpu gpu;
  for (const StateFormat format : all_state_formats) {
    for (std::size_t count = 0; count <= 1100; ++count) {
      const UpdateShape shape{.format = format, .count = count, .first_index = (std::uint64_t{1} << 32) - 512};
      INFO(described(shape, {}));
      REQUIRE(gpu.same(shape, {{0, count, 0}}, {{.rule = sample_rules()[0]}}));
    }
  }
}

TEST_CASE("CUDA updates of long lists of runs give the bits of the CPU", "[gpu]") {
  OnGpu gpu;
  std::vector<GroupStep> groups;
  for (const Rule& rule : sample_rules()) {
    groups.push_back({.rule = rule, .gradient_factor = 0.5f + static_cast<float>(groups.size())});
  }
  std::vector<Run> runs;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < 1000; ++i) {
    const std::size_t count = i * 37 % 4000;
    runs.push_back({begin, count, i % groups.size()});
    begin += (count + group_size - 1) / group_size * group_size + i % 3 * group_size;
  }
  for (const StateFormat format : all_state_formats) {
    CHECK(gpu.same({.format = format, .count = begin}, runs, groups));
  }
}

TEST_CASE("a CUDA update of more elements than the launch has threads gives the bits of the CPU", "[gpu]") {
  OnGpu gpu;
  for (const StateFormat format : all_state_formats) {
    const UpdateShape shape{.format = format, .count = (std::size_t{17} << 20) + 77};
    CHECK(gpu.same(shape, {{0, shape.count, 0}}, {{.rule = sample_rules()[0]}}));
  }
}

TEST_CASE("a NaN stays one in a CUDA update", "[gpu]") {
  OnGpu gpu;
  UpdateMemory memory(
      {.format = StateFormat::fp32, .parameter_dtype = DType::fp32, .gradient_dtype = DType::fp32, .count = 100});
  const float nan = std::nanf("");
  std::memcpy(const_cast<std::byte*>(memory.tile().gradient) + 40, &nan, 4);
  gpu.update(memory, {{0, 100, 0}}, {{.rule = sample_rules()[0]}});
  const auto* parameter = reinterpret_cast<const float*>(memory.tile().parameter);
  for (std::size_t i = 0; i < 100; ++i) {
    CHECK(std::isnan(parameter[i]) == (i == 10));
  }
}

TEST_CASE("the CUDA kernels say why they are missing") {
  if (!device::list().empty()) {
    return;
  }
  CHECK_THROWS_WITH(cuda_backend(nullptr), Catch::Contains("B2101") || Catch::Contains("B2102"));
}
