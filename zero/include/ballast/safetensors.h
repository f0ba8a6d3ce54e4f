// Weights in safetensors files: a training begins with those of the Hugging Face Hub, and writes its own for transformers.
//
//   const ballast::safetensors::Source weights("path/to/Llama-3.2-1B");
//   training.start(weights.parameters(model));
//   ...
//   ballast::safetensors::write("out", training);
//
// A tensor has the name that it has in checkpoints: see Tensor::name. Tied tensors are those of their owners.
#pragma once

#include <ballast/local_state.h>
#include <ballast/model.h>
#include <ballast/training.h>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::safetensors {

struct StoredTensor {
  std::string_view format{};  // as files name it, such as "BF16"
  std::vector<std::size_t> shape{};
  std::filesystem::path file{};
  std::size_t begin = 0;               // byte of the file
  std::span<const std::byte> bytes{};  // in the mapped file, at any address, while a copy of the Source exists
};

// The tensors of a model in files, which are mapped: bytes are read where they are used. Copies share the files. Any threads may call.
class Source {
 public:
  // `path` is a file, an index of several, or a folder with model.safetensors, with model.safetensors.index.json, or with a single
  // *.safetensors. Reads the headers. Throws B1001 if there is none of these, and B3202 for damaged or missing files.
  explicit Source(const std::filesystem::path& path);

  std::vector<std::string> names() const;                   // in alphabetical order
  const StoredTensor* find(const std::string& name) const;  // null: there is no such tensor

  // The values of all tensors of a model, for Training::start(). F64, F32, F16 and BF16 are rounded to the formats of the units, to
  // nearest, ties to even; F64 through fp32, as in torch. Units of u8 take formats of one byte. Throws B1001, with the first names,
  // if tensors are missing or do not fit. The files stay mapped as long as the result exists.
  ParameterSource parameters(const Model& model) const;

 private:
  struct Contents;
  std::shared_ptr<const Contents> contents_;
};

struct WriteOptions {
  std::size_t file_bytes = 5'000'000'000;  // the most bytes of tensors in a file, unless one tensor has more
};

// Writes the parameters in the formats of their units, to model.safetensors, or to several files with an index. transformers loads
// them with the config.json of the model next to them. All ranks call it together between steps. Rank 0 writes, unit by unit, so
// that no rank holds the model. The export in the directory, which is made if there is none, is replaced when the new one is on the
// drive: a job that is killed leaves the old one or the new one. A failure, such as a full drive (B2202), is thrown on all ranks, and
// removes what was written.
void write(const std::filesystem::path& directory, Training& training, const WriteOptions& options = {});

}  // namespace ballast::safetensors
