#include "benchmarks/offload/deepspeed.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "benchmarks/offload/program.h"
#include "kernels/runtime/error.h"

namespace ballast::benchmarks {

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

Sample run_deepspeed(const std::string& program, const TensorFiles& files) {
  const std::string command = fmt::format("{} {}", program, files.options());
  const std::string text = output_of(command + " 2>/dev/null");
  require(!text.empty(), Code::internal,
          [&] { return Problem{.what = "DeepSpeed's async_io could not be measured", .where = command}; });
  const auto sample = nlohmann::json::parse(text);
  return {sample["seconds"].get<double>(), sample["cpu_seconds"].get<double>()};
}

}  // namespace ballast::benchmarks
