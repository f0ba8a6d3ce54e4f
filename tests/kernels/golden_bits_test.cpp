// Tests that kernels give the recorded bits, so that processors that cannot be compared in one process are compared. The values
// were recorded on x86-64. A test that fails says which value it found.
#include <memory>
#include <span>

#include "kernels/orthogonalize.h"
#include "tests/digest.h"
#include "tests/kernels/test_backends.h"
#include "tests/kernels/update_memory.h"

namespace ballast::kernels {
namespace {

constexpr std::size_t golden_count = 1'003;  // fills neither the lanes nor a group

// An array of a format, whose bytes a digest takes when they are written.
struct Golden {
  Golden(DType of, const Patterns& patterns) : dtype(of), bytes(packed(patterns, of)) {}
  View view() { return {bytes.data(), bytes.size() / byte_size(dtype), dtype}; }
  DType dtype;
  std::vector<std::byte> bytes;
};

std::uint64_t digest_of_updates(Backend& backend, StateFormat format) {
  testing::Digest digest;
  std::vector<Run> runs;
  std::vector<GroupStep> groups;
  for (const Rule& rule : sample_rules()) {
    runs.push_back({runs.size() * 1024, golden_count, groups.size()});
    groups.push_back({.rule = rule, .gradient_factor = -0.37f});
  }
  for (UpdateShape shape : sample_shapes(format)) {
    shape.count = runs.size() * 1024;
    UpdateMemory memory(shape);
    for (int step = 0; step < 3; ++step) {
      backend.update(memory.tile(), runs, groups);
    }
    digest.add(memory.bytes());
  }
  return digest.value();
}

constexpr DType floats[] = {DType::fp32, DType::bf16, DType::fp16};

std::uint64_t digest_of_casts_and_sums(Backend& backend) {
  testing::Digest digest;
  for (const DType from : floats) {
    Golden any(from, any_patterns(from, golden_count, 1)), finite(from, finite_patterns(from, golden_count, 2));
    for (const DType to : floats) {
      Golden cast(to, Patterns(golden_count)), sum(to, finite_patterns(to, golden_count, 3));
      backend.cast(any.view(), cast.view());
      backend.accumulate(finite.view(), sum.view());
      digest.add(cast.bytes);
      digest.add(sum.bytes);
    }
    ExactSum squares;
    backend.sum_of_squares(Golden(from, finite_patterns(from, 1 << 16, 9)).view(), &squares);
    digest.add(std::as_bytes(std::span(squares.bins)));
  }
  Golden from(DType::bf16, finite_patterns(DType::bf16, golden_count, 4)),
      into(DType::bf16, any_patterns(DType::bf16, golden_count, 5));
  const Run run{0, golden_count, 0};
  backend.accumulate_stochastic(from.view(), into.view(), {&run, 1}, {.stream = 7});
  digest.add(into.bytes);
  return digest.value();
}

std::uint64_t digest_of_quantization(Backend& backend) {
  testing::Digest digest;
  for (const CodeBits bits : {CodeBits::eight, CodeBits::four}) {
    for (const DType dtype : floats) {
      for (const bool stochastic : {false, true}) {
        Golden values(dtype, finite_patterns(dtype, golden_count, 6));
        Golden blocks(DType::u8, Patterns(quantized_bytes(golden_count, bits)));
        backend.quantize(values.view(), {bits, blocks.view()}, {.stochastic = stochastic, .stream = 42});
        backend.dequantize({bits, blocks.view()}, values.view());
        digest.add(blocks.bytes);
        digest.add(values.bytes);
      }
    }
  }
  return digest.value();
}

std::uint64_t digest_of_orthogonalization(Orthogonalizer& on) {
  const MatrixShape shape{70, 110, 2};
  Golden matrices(DType::bf16, finite_patterns(DType::bf16, shape.elements(), 8));
  std::vector<std::byte> workspace(on.workspace_bytes(shape) + workspace_alignment);
  void* aligned = workspace.data();
  std::size_t room = workspace.size();
  std::align(workspace_alignment, on.workspace_bytes(shape), aligned, room);
  on(matrices.view(), shape, {.steps = std::vector<Quintic>(5, {3.4445f, -4.7750f, 2.0315f})},
     {static_cast<std::byte*>(aligned), on.workspace_bytes(shape), DType::u8});
  testing::Digest digest;
  digest.add(matrices.bytes);
  return digest.value();
}

}  // namespace

TEST_CASE("kernels give the recorded bits") {
  for (const simd::Isa isa : simd::usable_isas()) {
    INFO(simd::name(isa));
    const auto backend = cpu_backend({.threads = 1, .isa = isa});
    CHECK(digest_of_updates(*backend, StateFormat::fp32) == 0xda2110081ecf0047);
    CHECK(digest_of_updates(*backend, StateFormat::split) == 0x284ed25c6c6acef7);
    CHECK(digest_of_updates(*backend, StateFormat::bf16) == 0x05b4080fac9fe77d);
    CHECK(digest_of_updates(*backend, StateFormat::compact) == 0x9163ce207a78f89e);
    CHECK(digest_of_updates(*backend, StateFormat::four_bit) == 0xc455d81b33de9fff);
    CHECK(digest_of_casts_and_sums(*backend) == 0x7d52b515915ea9af);
    CHECK(digest_of_quantization(*backend) == 0xeb6690be991b5a71);
    CHECK(digest_of_orthogonalization(*cpu_orthogonalizer({.threads = 1, .isa = isa})) == 0x6f1902a554a943b3);
  }
}

}  // namespace ballast::kernels
