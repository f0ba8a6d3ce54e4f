#include "benchmarks/harness/limits.h"

#include <ballast/error.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#define BALLAST_FOR_EACH_ISA [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
#else
#define BALLAST_FOR_EACH_ISA
#endif

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/runtime/sizes.h"

namespace ballast::benchmarks {
namespace {

constexpr std::size_t page_of_floats = 4096 / sizeof(float);

BALLAST_FOR_EACH_ISA void copy_loop(float* to, const float* from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = from[i] + 0.0f;  // the addition keeps the compiler from calling memcpy
  }
}

BALLAST_FOR_EACH_ISA void scale_loop(float* data, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    data[i] = 0.999f * data[i];
  }
}

BALLAST_FOR_EACH_ISA void read_loop(const float* data, std::size_t count) {
  std::uint32_t mixed = 0;
  for (std::size_t i = 0; i < count; ++i) {
    mixed ^= std::bit_cast<std::uint32_t>(data[i]);
  }
  asm volatile("" : : "r"(mixed));  // the compiler would drop a result without a use
}

void memcpy_floats(float* to, const float* from, std::size_t count) { std::memcpy(to, from, count * sizeof(float)); }

}  // namespace

void stream_copy(float* to, const float* from, std::size_t count) {
#if defined(__x86_64__)
  constexpr std::size_t line = 16;  // floats; four stores fill a write-combining buffer
  const std::size_t whole = count / line * line;
  for (std::size_t i = 0; i < whole; i += line) {
    _mm_stream_ps(to + i, _mm_load_ps(from + i));
    _mm_stream_ps(to + i + 4, _mm_load_ps(from + i + 4));
    _mm_stream_ps(to + i + 8, _mm_load_ps(from + i + 8));
    _mm_stream_ps(to + i + 12, _mm_load_ps(from + i + 12));
  }
  for (std::size_t i = whole; i < count; ++i) {
    to[i] = from[i];
  }
  _mm_sfence();
#else
  std::memcpy(to, from, count * sizeof(float));
#endif
}

const std::array<Copy, 3> all_copies{
    {{"copy (memcpy)", memcpy_floats}, {"copy (loop)", copy_loop}, {"copy (streaming)", stream_copy}}};

Limits::Limits(std::size_t most_bytes, const Threads& threads) : threads_(&threads) {
  // A run reads and writes, so each buffer holds half of the bytes that it moves.
  for (int buffer = 0; buffer < 2; ++buffer)
    buffers_.emplace_back(most_bytes / 2);
}

template <class Walk>
Subject Limits::walking(std::size_t bytes, std::size_t accesses, Walk walk) const {
  require(bytes <= accesses * buffers_[0].bytes(), Code::bad_argument, [&] {
    return Problem{.what = "cannot measure a limit: it moves more bytes than its buffers hold",
                   .needed = human_bytes(bytes),
                   .available = human_bytes(accesses * buffers_[0].bytes()),
                   .remedy = "Raise --elements: some cases have a smallest size of their own."};
  });
  const std::size_t count = bytes / (sizeof(float) * accesses);
  const auto run = [this, count, walk] {
    for_slices(*threads_, count, page_of_floats,
               [&](std::size_t first, std::size_t last) { walk(first, last - first); });
  };
  return {.work = static_cast<double>(count * sizeof(float) * accesses) / 1e9, .run = run};
}

Subject Limits::copy(const Copy& method, std::size_t bytes) const {
  return walking(bytes, 2, [this, run = method.run](std::size_t first, std::size_t count) {
    run(data(0) + first, data(1) + first, count);
  });
}

Subject Limits::scale(std::size_t bytes) const {
  return walking(bytes, 2, [this](std::size_t first, std::size_t count) { scale_loop(data(0) + first, count); });
}

Subject Limits::read(std::size_t bytes) const {
  return walking(bytes, 1, [this](std::size_t first, std::size_t count) { read_loop(data(0) + first, count); });
}

}  // namespace ballast::benchmarks
