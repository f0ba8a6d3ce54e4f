// Runs one test on many backends. A test is a function of a TestBackend: it places its arguments in memory that the
// backend reaches, and reads results back. `on_every_isa(test)` and `on_every_cpu(test)` run it on CPUs.
#pragma once

#include <catch2/catch.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/numbers.h"
#include "tests/sanitizer.h"

namespace ballast::kernels {

class TestBackend {
 public:
  virtual ~TestBackend() = default;
  virtual std::string name() const = 0;
  virtual Backend& kernels() = 0;
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;  // aligned to 64 bytes
  virtual void write(std::byte* to, const void* from, std::size_t bytes) = 0;
  virtual void read(void* to, const std::byte* from, std::size_t bytes) = 0;  // reads when all work is done

  // Returns the distance between the cases to run of a sweep: 1, or n where each takes long.
  virtual std::size_t every(std::size_t n) const { return testing::every(n); }
};

using BackendTest = std::function<void(TestBackend&)>;

void on_every_isa(const BackendTest& test);  // each runs on one thread
void on_every_cpu(const BackendTest& test);  // the same on 1, 2, 3 and 7 threads; under a sanitizer on 3

Backend& plain_backend();  // scalar code on one thread, whose bits the others must give

// Elements as 32-bit words that hold their patterns.
using Patterns = std::vector<std::uint32_t>;
std::vector<std::byte> packed(const Patterns& patterns, DType dtype);
Patterns unpacked(const std::vector<std::byte>& bytes, DType dtype);

inline constexpr DType floating_dtypes[] = {DType::fp32, DType::bf16, DType::fp16};

// Returns any patterns, including NaN, infinities and subnormals.
Patterns any_patterns(DType dtype, std::size_t count, std::uint32_t seed);
Patterns finite_patterns(DType dtype, std::size_t count, std::uint32_t seed);  // values from 2^-14 to 1, both signs
bool is_finite(DType dtype, std::uint32_t pattern);

// An array in a backend's memory, `offset` elements after an aligned address. read() also checks that nothing around
// the array was written.
class Placed {
 public:
  Placed(TestBackend& on, const Patterns& patterns, DType dtype, std::size_t offset = 0);
  View view() const { return {memory_.get() + before_, count_, dtype_}; }
  Patterns read() const;

 private:
  TestBackend& on_;
  DType dtype_;
  std::size_t count_;
  std::size_t before_;
  std::vector<std::byte> placed_;
  std::shared_ptr<std::byte> memory_;
};

// One value of a plain type in a backend's memory.
template <class T>
class PlacedValue {
 public:
  PlacedValue(TestBackend& on, const T& value) : on_(on), memory_(on.allocate(sizeof(T))) {
    on.write(memory_.get(), &value, sizeof(T));
  }
  T* get() const { return reinterpret_cast<T*>(memory_.get()); }
  T read() const {
    T value;
    on_.read(&value, memory_.get(), sizeof(T));
    return value;
  }

 private:
  TestBackend& on_;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace ballast::kernels
