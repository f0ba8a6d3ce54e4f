// Memory like that of the library's own host buffers: page-aligned, in huge pages, resident before anything is timed.
#pragma once

#include <span>

#include "kernels/runtime/host_pages.h"

namespace ballast::benchmarks {

class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes), memory_(map_host_pages(bytes, "a benchmark")) {}

  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

  template <class T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(data()), bytes_ / sizeof(T)};
  }

 private:
  std::size_t bytes_;
  HostPages memory_;
};

}  // namespace ballast::benchmarks
