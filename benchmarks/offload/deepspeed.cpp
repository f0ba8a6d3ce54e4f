#include "benchmarks/offload/deepspeed.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "benchmarks/offload/program.h"

namespace ballast::benchmarks {

Sample run_deepspeed(const std::string& program, const TensorFiles& files) {
  const std::string command = fmt::format("{} {}", program, files.options());
  const std::string text = output_of(command + " 2>/dev/null");
  require(!text.empty(), Code::internal,
          [&] { return Problem{.what = "DeepSpeed's async_io could not be measured", .where = command}; });
  const auto sample = nlohmann::json::parse(text);
  return {sample["seconds"].get<double>(), sample["cpu_seconds"].get<double>()};
}

}  // namespace ballast::benchmarks
