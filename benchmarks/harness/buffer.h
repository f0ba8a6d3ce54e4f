// Memory as the library's host buffers have it: page-aligned, huge pages, touched before anything is timed.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "benchmarks/harness/threads.h"

namespace ballast::benchmarks {

class Buffer {
 public:
  // Filled with zeros by the threads that will use it, slice by slice.
  Buffer(std::size_t bytes, Threads& threads);

  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

  template <class T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(data()), bytes_ / sizeof(T)};
  }

 private:
  struct Unmap {
    std::size_t mapped;
    void operator()(std::byte* memory) const;
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Unmap> memory_;
};

}  // namespace ballast::benchmarks
