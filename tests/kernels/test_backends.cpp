#include "tests/kernels/test_backends.h"

#include <fmt/format.h>

#include <cstring>
#include <random>

namespace ballast::kernels {
namespace {

constexpr std::size_t guard_bytes = 64;
constexpr std::byte guard{0xa5};

class CpuUnderTest : public TestBackend {
 public:
  CpuUnderTest(simd::Isa isa, int threads)
      : name_(fmt::format("{}, {} threads", simd::name(isa), threads)),
        backend_(cpu_backend({.threads = threads, .isa = isa})) {}

  std::string name() const override { return name_; }
  Backend& kernels() override { return *backend_; }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    const std::align_val_t alignment{64};
    return {static_cast<std::byte*>(::operator new(bytes, alignment)),
            [=](std::byte* memory) { ::operator delete(memory, alignment); }};
  }
  void write(std::byte* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
  void read(void* to, const std::byte* from, std::size_t bytes) override { copy(to, from, bytes); }

 private:
  static void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) {
      std::memcpy(to, from, bytes);
    }
  }

  std::string name_;
  std::unique_ptr<Backend> backend_;
};

void run(const BackendTest& test, simd::Isa isa, int threads) {
  CpuUnderTest cpu(isa, threads);
  INFO("on " << cpu.name());
  test(cpu);
}

std::uint32_t sign_bit(DType dtype) { return dtype == DType::fp32 ? 0x80000000u : 0x8000u; }
std::uint32_t infinity(DType dtype) {
  return dtype == DType::fp32 ? 0x7f800000u : dtype == DType::bf16 ? 0x7f80u : 0x7c00u;
}
std::uint32_t one(DType dtype) { return dtype == DType::fp32 ? 0x3f800000u : dtype == DType::bf16 ? 0x3f80u : 0x3c00u; }

// A copy whose size the compiler does not know becomes a call, which a sanitizer checks byte by byte.
template <class Use>
void with_bits_of(DType dtype, const Use& use) {
  switch (byte_size(dtype)) {
    case 1: return use(std::uint8_t{});
    case 2: return use(std::uint16_t{});
    default: return use(std::uint32_t{});
  }
}

}  // namespace

void on_every_isa(const BackendTest& test) {
  for (const simd::Isa isa : simd::usable_isas()) {
    run(test, isa, 1);
  }
}

void on_every_cpu(const BackendTest& test) {
  for (const simd::Isa isa : simd::usable_isas()) {
    for (const int threads : testing::sanitized ? std::vector{3} : std::vector{1, 2, 3, 7}) {
      run(test, isa, threads);
    }
  }
}

Backend& plain_backend() {
  static const std::unique_ptr<Backend> backend = cpu_backend({.threads = 1, .isa = simd::Isa::scalar});
  return *backend;
}

std::vector<std::byte> packed(const Patterns& patterns, DType dtype) {
  std::vector<std::byte> bytes(patterns.size() * byte_size(dtype));
  with_bits_of(dtype, [&](auto bits) {
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      bits = static_cast<decltype(bits)>(patterns[i]);
      std::memcpy(bytes.data() + i * sizeof bits, &bits, sizeof bits);
    }
  });
  return bytes;
}

Patterns unpacked(const std::vector<std::byte>& bytes, DType dtype) {
  Patterns patterns(bytes.size() / byte_size(dtype));
  with_bits_of(dtype, [&](auto bits) {
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      std::memcpy(&bits, bytes.data() + i * sizeof bits, sizeof bits);
      patterns[i] = bits;
    }
  });
  return patterns;
}

Patterns any_patterns(DType dtype, std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  const std::uint32_t inf = infinity(dtype);
  const std::uint32_t special[] = {0, 1, 2, inf, inf + 1, inf - 1, inf | inf >> 1, one(dtype), one(dtype) + 1};
  const std::uint32_t all = sign_bit(dtype) | (sign_bit(dtype) - 1);
  Patterns patterns(count);
  for (auto& pattern : patterns) {
    pattern = static_cast<std::uint32_t>(random()) & all;
    if (random() % 8 == 0) {
      pattern = (pattern & sign_bit(dtype)) | special[random() % std::size(special)];
    }
  }
  return patterns;
}

Patterns finite_patterns(DType dtype, std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  const std::uint32_t power_of_two = dtype == DType::fp32 ? 1u << 23 : dtype == DType::bf16 ? 1u << 7 : 1u << 10;
  Patterns patterns(count);
  for (auto& pattern : patterns) {
    pattern = one(dtype) - 1 - static_cast<std::uint32_t>(random()) % (14 * power_of_two);
    if (random() % 2 == 0) {
      pattern |= sign_bit(dtype);
    }
  }
  return patterns;
}

bool is_finite(DType dtype, std::uint32_t pattern) { return (pattern & infinity(dtype)) != infinity(dtype); }

Placed::Placed(TestBackend& on, const Patterns& patterns, DType dtype, std::size_t offset)
    : on_(on), dtype_(dtype), count_(patterns.size()), before_(guard_bytes + offset * byte_size(dtype)) {
  const std::vector<std::byte> bytes = packed(patterns, dtype);
  placed_.assign(before_ + bytes.size() + guard_bytes, guard);
  std::copy(bytes.begin(), bytes.end(), placed_.begin() + static_cast<std::ptrdiff_t>(before_));
  memory_ = on.allocate(placed_.size());
  on.write(memory_.get(), placed_.data(), placed_.size());
}

Patterns Placed::read() const {
  std::vector<std::byte> all(placed_.size());
  on_.read(all.data(), memory_.get(), all.size());
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(before_);
  const auto end = all.end() - static_cast<std::ptrdiff_t>(guard_bytes);
  const auto untouched = [](std::byte value) { return value == guard; };
  const bool stayed_inside = std::all_of(all.begin(), begin, untouched) && std::all_of(end, all.end(), untouched);
  if (!stayed_inside) {
    FAIL("a kernel wrote outside its array of " << count_ << " elements");
  }
  return unpacked({begin, end}, dtype_);
}

}  // namespace ballast::kernels
