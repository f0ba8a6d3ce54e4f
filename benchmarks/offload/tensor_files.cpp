#include "benchmarks/offload/tensor_files.h"

#include <fmt/format.h>

namespace ballast::benchmarks {

using offload::block_bytes;

TensorFiles::TensorFiles(std::filesystem::path folder, std::size_t tiles, std::size_t tile_bytes)
    : folder_(std::move(folder)), tiles_(tiles), tile_bytes_(tile_bytes) {
  std::filesystem::create_directories(folder_);
}

TensorFiles::~TensorFiles() {
  std::error_code stays;
  std::filesystem::remove_all(folder_, stays);
}

std::string TensorFiles::options() const {
  return fmt::format("--folder {} --tiles {} --tile-bytes {}", folder_.string(), tiles_, tile_bytes_);
}

std::filesystem::path TensorFiles::path(std::size_t tile, std::size_t tensor) const {
  return folder_ / fmt::format("tile-{}-{}", tile, tensor);
}

void TensorFiles::create() const {
  for (std::size_t tile = 0; tile < tiles_; ++tile) {
    for (std::size_t tensor = 0; tensor < tensors_of_tile; ++tensor) {
      offload::File(path(tile, tensor), {.create = true});
    }
  }
}

void TensorFiles::move(offload::IoKind kind, std::size_t tile, std::span<std::byte> memory,
                       offload::IoQueue& queue) const {
  const std::size_t bytes = tile_bytes_ / tensors_of_tile / block_bytes * block_bytes;
  std::vector<offload::File> files;
  files.reserve(tensors_of_tile);
  offload::InFlight under_way;
  for (std::size_t tensor = 0; tensor < tensors_of_tile; ++tensor) {
    const auto& file = files.emplace_back(path(tile, tensor));
    under_way.add(queue.submit({kind, &file, 0, memory.subspan(tensor * bytes, bytes)}));
  }
  under_way.wait();
}

}  // namespace ballast::benchmarks
