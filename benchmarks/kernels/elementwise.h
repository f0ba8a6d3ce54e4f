// AdamW, and the kernels around the optimizer step, which move, sum, check and pack values. All are from memory, on any device.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/harness/measure.h"
#include "kernels/backend.h"

namespace ballast::benchmarks {

inline constexpr unsigned char byte_of_values = 0x3c;  // bf16 0x3c3c is 0.0115, and fp32 0x3c3c3c3c nearly the same

// The device that kernels run on, with its memory.
class Place {
 public:
  virtual ~Place() = default;

  virtual kernels::Backend& backend() = 0;
  virtual std::shared_ptr<std::byte> memory(std::size_t bytes) = 0;                // filled with byte_of_values
  virtual void set(std::byte* memory, unsigned char byte, std::size_t bytes) = 0;  // runs in the order of the kernels

  // A subject whose `issue` moves `bytes`, read and written together.
  virtual Subject moving(std::size_t bytes, std::function<void()> issue) const = 0;
};

std::shared_ptr<Place> cpu_place(int threads);

// Without memory, the subject has its own.
struct Gradients {
  std::shared_ptr<std::byte> memory{};
  DType dtype = DType::bf16;
};

// AdamW as bf16 training uses it: gradients in, bf16 parameters out, and the state of one format rewritten, in tiles as the engine
// updates, each with its state in one stretch of memory.
Subject adamw(const std::shared_ptr<Place>& place, StateFormat format, std::size_t elements, std::size_t most_of_tile,
              Gradients gradients = {});

struct ElementwiseCase {
  std::string name;
  std::string against;  // "copy", or "read" for a kernel that writes next to nothing
  std::function<Subject(const std::shared_ptr<Place>&, std::size_t elements)> make;
};
std::vector<ElementwiseCase> elementwise_cases();

}  // namespace ballast::benchmarks
