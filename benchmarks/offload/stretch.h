// Tiles through the library's queues, as many at once as a queue is deep.
#pragma once

#include <deque>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/harness/buffer.h"
#include "kernels/runtime/sizes.h"
#include "offload/io_queue.h"

namespace ballast::benchmarks {

// Files of one size, one in each directory, written once, each with its own queue.
class Stretch {
 public:
  Stretch(const std::vector<std::string>& directories, std::size_t bytes, std::size_t depth)
      : file_bytes_(round_up(bytes / directories.size(), largest_tile)),
        depth_(depth),
        memory_(directories.size() * depth * largest_tile) {
    for (const std::filesystem::path directory : directories) {
      files_.push_back(
          std::make_unique<offload::File>(directory / "ballast-benchmark", offload::FileOptions{.create = true}));
      queues_.push_back(offload::open_queue({.depth = depth}));
      queues_.back()->remember(memory_.as<std::byte>());
      queues_.back()->remember(*files_.back());
    }
    move("write", largest_tile);
  }

  std::vector<std::string> files() const {
    std::vector<std::string> paths;
    for (const auto& file : files_) {
      paths.push_back(file->path().string());
    }
    return paths;
  }
  std::size_t bytes() const { return file_bytes_ * files_.size(); }

  // `direction` is fio's word: "read", "write", or "rw", in which every second tile is written. Tiles go to the files in turn. When
  // all places in memory are in use, the loop waits for the older half. The drive stays busy with the other half, and threads wake
  // each other once for many tiles.
  void move(const std::string& direction, std::size_t tile_bytes) {
    const std::size_t places = depth_ * files_.size();
    std::deque<offload::Completion> under_way;
    for (std::size_t tile = 0; tile < bytes() / tile_bytes; ++tile) {
      if (under_way.size() == places) {
        under_way[places / 2 - 1].wait();  // the last of them first: most others have ended by then
        for (std::size_t i = 0; i < places / 2; ++i) {
          under_way.front().wait();
          under_way.pop_front();
        }
      }
      const std::size_t file = tile % files_.size();
      const std::size_t tile_in_file = tile / files_.size();
      const bool reads = direction == "read" || (direction == "rw" && tile_in_file % 2 == 0);
      under_way.push_back(queues_[file]->submit(
          {reads ? offload::IoKind::read : offload::IoKind::write, files_[file].get(), tile_in_file * tile_bytes,
           memory_.as<std::byte>().subspan(tile % places * tile_bytes, tile_bytes)}));
    }
    for (const offload::Completion& completion : under_way) {
      completion.wait();
    }
  }

 private:
  static constexpr std::size_t largest_tile = std::size_t{16} << 20;

  std::size_t file_bytes_;
  std::size_t depth_;
  std::vector<std::unique_ptr<offload::File>> files_;
  std::vector<std::unique_ptr<offload::IoQueue>> queues_;
  Buffer memory_;
};

}  // namespace ballast::benchmarks
