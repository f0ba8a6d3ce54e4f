// A tile's state as stored by an optimizer that swaps tensor by tensor: a file for each of its four tensors.
#pragma once

#include <array>
#include <filesystem>
#include <string>

#include "offload/file.h"
#include "offload/io_queue.h"

namespace ballast::benchmarks {

inline constexpr std::size_t tensors_of_tile = 4;  // parameter, remainder and two moments

// A folder for such files. The destructor removes it.
class TensorFiles {
 public:
  TensorFiles(std::filesystem::path folder, std::size_t tiles, std::size_t tile_bytes);
  ~TensorFiles();

  std::size_t tile_bytes() const { return tile_bytes_; }
  void create() const;          // all files, empty
  std::string options() const;  // for an external program that makes them

  // Opens the files of a tile, moves all of them to or from `memory`, and waits.
  void move(offload::IoKind kind, std::size_t tile, std::span<std::byte> memory, offload::IoQueue& queue) const;

 private:
  std::filesystem::path path(std::size_t tile, std::size_t tensor) const;

  std::filesystem::path folder_;
  std::size_t tiles_;
  std::size_t tile_bytes_;
};

}  // namespace ballast::benchmarks
