// Tests of safetensors files: weights are read in every format and by ranges, what does not fit or is damaged is refused, and what a
// training writes has its bits.
#include <ballast/safetensors.h>

#include <bit>
#include <limits>

#include "tests/fuzz/mutants.h"
#include "tests/limited_child.h"
#include "tests/sanitizer.h"
#include "tests/skip.h"
#include "tests/zero/killed_at_call.h"
#include "tests/zero/moved_run.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

namespace fs = std::filesystem;
using safetensors::Source;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::string file_of(const std::string& header, const std::string& data, std::uint64_t bytes = SIZE_MAX) {
  const std::uint64_t size = std::min<std::uint64_t>(bytes, header.size());
  return std::string(reinterpret_cast<const char*>(&size), sizeof size) + header + data;
}

std::string entry(const std::string& name, const std::string& format, const std::string& shape, std::size_t begin,
                  std::size_t end) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", name, format, shape, begin, end);
}

void write_file(const fs::path& path, const std::string& content) { std::ofstream(path, std::ios::binary) << content; }

std::string failure_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

std::string failure_of_file(const std::string& content) {
  const TemporaryDirectory directory;
  write_file(directory.path() / "model.safetensors", content);
  return failure_of([&] { const Source source(directory.path()); });
}

// A model of one tensor.
Model model_of(DType dtype, std::vector<std::size_t> shape, const std::string& name = "u.t") {
  Model model;
  model.unit("u", dtype);
  model.tensor({.name = name, .shape = std::move(shape), .frozen = dtype == DType::u8});
  return model;
}

template <class T>
std::vector<T> read(const ParameterSource& parameters, Range range) {
  std::vector<T> values(range.count);
  parameters(0, 0, range, View(reinterpret_cast<std::byte*>(values.data()), range.count, dtype_of<T>));
  return values;
}

template <class T>
std::vector<unsigned> patterns(const std::vector<T>& values) {
  std::vector<unsigned> found;
  for (const T& each : values) {
    if constexpr (std::is_same_v<T, float>) {
      found.push_back(std::bit_cast<unsigned>(each));
    } else {
      found.push_back(each.bits);
    }
  }
  return found;
}

}  // namespace

TEST_CASE("weights of all formats are read, rounded to nearest") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "any.safetensors";
  // 1 + 2^-8 and 1 + 3 * 2^-8 are ties in bf16. The first tensor of one byte puts the others at odd addresses.
  const std::vector<double> wide{1.0, 1.0 + 0x1p-8, 1.0 + 0x3p-8, -2.5, 0x1p-30, 65520.0};
  const std::vector<float> values(wide.begin(), wide.end());
  const std::vector<std::uint16_t> brain{0x3f80, 0x4000, 0xc020}, half{0x3c00, 0x4000, 0x0001};
  write_file(path, file_of("{" + entry("pad", "U8", "1", 0, 1) + "," + entry("d", "F64", "2,3", 1, 49) + "," +
                               entry("f", "F32", "2,3", 49, 73) + "," + entry("b", "BF16", "3", 73, 79) + "," +
                               entry("h", "F16", "3", 79, 85) + R"(,"__metadata__":{"format":"pt"}})",
                           "x" + bytes_of(wide) + bytes_of(values) + bytes_of(brain) + bytes_of(half)));
  const Source source(directory.path());
  CHECK(source.names() == std::vector<std::string>{"b", "d", "f", "h", "pad"});
  REQUIRE(source.find("f") != nullptr);
  CHECK(source.find("f")->format == "F32");
  CHECK(source.find("f")->shape == std::vector<std::size_t>{2, 3});
  CHECK(source.find("f")->bytes.size() == 24);
  CHECK(source.find("u.f") == nullptr);
  const auto of = [&](const char* name, DType dtype, std::vector<std::size_t> shape) {
    return Source(path).parameters(model_of(dtype, std::move(shape), name));  // the files outlive the Source
  };
  CHECK(patterns(read<bf16>(of("b", DType::bf16, {3}), {0, 3})) == std::vector<unsigned>{0x3f80, 0x4000, 0xc020});
  CHECK(read<float>(of("b", DType::fp32, {3}), {1, 2}) == std::vector<float>{2.0f, -2.5f});
  CHECK(read<float>(of("h", DType::fp32, {3}), {0, 3}) == std::vector<float>{1.0f, 2.0f, 0x1p-24f});
  CHECK(read<std::uint8_t>(of("pad", DType::u8, {1}), {0, 1}) == std::vector<std::uint8_t>{'x'});
  for (const char* const name : {"d", "f"}) {
    CHECK(read<float>(of(name, DType::fp32, {2, 3}), {0, 6}) == values);
    CHECK(read<float>(of(name, DType::fp32, {2, 3}), {2, 2}) == std::vector<float>{values[2], values[3]});
    CHECK(patterns(read<bf16>(of(name, DType::bf16, {2, 3}), {0, 6})) ==
          std::vector<unsigned>{0x3f80, 0x3f80, 0x3f82, 0xc020, 0x3080, 0x4780});
    CHECK(patterns(read<fp16>(of(name, DType::fp16, {2, 3}), {1, 5})) ==
          std::vector<unsigned>{0x3c04, 0x3c0c, 0xc100, 0x0000, 0x7c00});
  }
}

TEST_CASE("long tensors are converted piece by piece") {
  const TemporaryDirectory directory;
  std::vector<float> values(700'001);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(i % 251);
  write_file(directory.path() / "a.safetensors",
             file_of("{" + entry("u.t", "F32", "700001", 0, 2800004) + "}", bytes_of(values)));
  const ParameterSource parameters = Source(directory.path()).parameters(model_of(DType::bf16, {700'001}));
  const std::vector<bf16> read_values = read<bf16>(parameters, {7, 699'990});
  bool is_same = true;
  for (std::size_t i = 0; i < read_values.size(); ++i)
    is_same = is_same && kernels::from_bf16(std::uint32_t{read_values[i].bits}) == values[i + 7];
  CHECK(is_same);
}

TEST_CASE("an index names the files of a model") {
  const TemporaryDirectory directory;
  const auto index = [&](const std::string& weights) {
    write_file(directory.path() / "model.safetensors.index.json",
               R"({"metadata":{"total_size":8},"weight_map":{)" + weights + "}}");
  };
  const std::string one = entry("u.t", "F32", "1", 0, 4), other = entry("w", "F32", "1", 0, 4);
  write_file(directory.path() / "1.safetensors", file_of("{" + one + "}", bytes_of<float>({3.0f})));
  write_file(directory.path() / "2.safetensors", file_of("{" + other + "}", bytes_of<float>({4.0f})));
  const auto failure = [&] { return failure_of([&] { const Source source(directory.path()); }); };
  CHECK_THAT(failure(), Contains("B1001 cannot read weights: there are several files, and no index of them"));
  index(R"("u.t":"1.safetensors","w":"2.safetensors")");
  CHECK(Source(directory.path()).names() == std::vector<std::string>{"u.t", "w"});
  const Source source(directory.path() / "model.safetensors.index.json");
  CHECK(read<float>(source.parameters(model_of(DType::fp32, {1})), {0, 1}) == std::vector<float>{3.0f});
  CHECK(read<float>(source.parameters(model_of(DType::fp32, {1}, "w")), {0, 1}) == std::vector<float>{4.0f});
  index(R"("u.t":"1.safetensors","w":"3.safetensors")");
  CHECK_THAT(failure(), Contains("B3202") && Contains("index.json") && Contains("weight_map.w is \"3.safetensors\"") &&
                            Contains("the name of a file that is next to the index"));
  index(R"("u.t":"../1.safetensors")");
  CHECK_THAT(failure(), Contains("B3202") && Contains("the name of a file that is next to the index"));
  index(R"("u.t":"1.safetensors","v":"2.safetensors")");
  CHECK_THAT(failure(), Contains("B3202") && Contains("v is not in 2.safetensors"));
  index(R"("w":"1.safetensors","w":"2.safetensors")");
  CHECK_THAT(failure(), Contains("index.json") && Contains("it names \"w\" twice"));
  fs::copy(directory.path() / "1.safetensors", directory.path() / "3.safetensors");
  index(R"("u.t":"1.safetensors","w":"3.safetensors")");
  CHECK_THAT(failure(), Contains("B3202") && Contains("3.safetensors") && Contains("another file has u.t too"));
  index("");
  write_file(directory.path() / "model.safetensors.index.json", "{}");
  CHECK_THAT(failure(), Contains("B3202") && Contains("weight_map is missing"));
  fs::copy(directory.path() / "2.safetensors", directory.path() / "model.safetensors");
  CHECK(Source(directory.path()).names() == std::vector<std::string>{"w"});  // as transformers does
}

TEST_CASE("files that are missing or damaged are refused by name") {
  const std::string floats = bytes_of<float>({1.0f, 2.0f});
  const std::string whole = entry("a", "F32", "2", 0, 8);
  CHECK(failure_of_file(file_of("{" + whole + "}", floats)) == "none");
  CHECK(failure_of_file(file_of("{}", "")) == "none");
  const std::pair<std::string, std::string> damaged[] = {
      {"", "it is empty"},
      {"1234",
       "B1001 cannot read weights: it is no safetensors file, nor an index of some: it ends before its header does"},
      {file_of("{" + whole + "}", "").substr(0, 20),
       "it is no safetensors file, nor an index of some: it ends before its header does"},
      {file_of("{" + whole + "}", floats.substr(1)), "B3202 cannot use a file: it is cut off inside of a"},
      {file_of("{" + whole + "}", floats + "1"), "no tensor has the 1 bytes at the end of it"},
      {file_of("{" + whole + "}", floats, 30), "parse error"},
      {file_of("[1]", ""), "its header is no JSON object"},
      {file_of("{" + whole + "," + entry("b", "F32", "1", 4, 8) + "}", floats),
       "B3202 cannot use a file: b overlaps with a"},
      {file_of("{" + entry("a", "F32", "1", 4, 8) + "}", floats), "a does not begin where the header ends"},
      {file_of("{" + whole + "," + whole + "}", floats), "it names \"a\" twice"},
      {file_of("{" + entry("a", "F32", "3", 0, 8) + "}", floats), "a has 8 bytes"},
      {file_of("{" + entry("a", "F32", "2", 8, 0) + "}", floats), "a has -8 bytes"},
      {file_of("{" + entry("a", "F4", "2", 0, 1) + "}", "x"), "B1001 cannot read a tensor that holds F4"},
      {file_of("{" + entry("a", "F32", "-1", 0, 8) + "}", floats), "a.shape[0] is -1"},
      {file_of("{" + entry("a", "F32", "4294967296,4294967296", 0, 0) + "}", ""), "the shape of a tensor that fits"},
      {file_of(R"({"a":{"dtype":"F32","shape":[2]}})", floats), "a.data_offsets is missing"}};
  for (const auto& [content, words] : damaged) {
    CHECK_THAT(failure_of_file(content), Contains("model.safetensors") && Contains(words));
  }
  const TemporaryDirectory directory;
  for (const fs::path& path : {directory.path(), directory.path() / "nothing"}) {
    CHECK_THAT(failure_of([&] { const Source source(path); }),
               Contains("B1001 cannot read weights: there are none") && Contains(path.string()));
  }
}

TEST_CASE("all tensors of a model that are missing or do not fit are named before anything is read") {
  const TemporaryDirectory directory;
  write_file(directory.path() / "a.safetensors",
             file_of("{" + entry("u.a", "F32", "2", 0, 8) + "," + entry("u.b", "I32", "2", 8, 16) + "," +
                         entry("head", "F32", "2", 16, 24) + "}",
                     std::string(24, '\0')));
  const Source source(directory.path());
  Model model;
  model.unit("u", DType::fp32);
  const TensorId tied = model.tensor({"u.a", {2}});
  model.unit("v", DType::fp32);
  model.tensor({.name = "head", .shape = {2}, .frozen = true});
  model.tied("head", tied);  // in the files under another name, which is not looked for
  CHECK_NOTHROW(source.parameters(model));
  model.units[0].tensors[0].shape = {1, 2};
  model.units[0].tensors.push_back({"u.b", {2}});
  for (const char* const name : {"v.c", "v.d", "v.e"})
    model.tensor({name, {1}});
  CHECK_THAT(
      failure_of([&] { source.parameters(model); }),
      Contains("B1001 cannot read the weights of a model: 5 of its tensors are missing or do not fit") &&
          Contains("u.a has the shape [2], and [1, 2] in the model; u.b has the format I32, and fp32 in the model; "
                   "v.c is missing; v.d is missing; and 1 more") &&
          Contains("The files have head, u.a, u.b.") && Contains("Model::tied()"));
}

TEST_CASE("damaged headers are refused, or read right") {
  const std::string genuine =
      file_of("{" + entry("a", "F32", "2", 0, 8) + "," + entry("b", "U8", "3", 8, 11) + "}", "01234567abc");
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "model.safetensors";
  CHECK_NOTHROW(for_mutants(2000, [&](std::mt19937_64& random) {
    write_file(path, mutant(genuine, random));
    may_refuse([&] {
      const Source source(path);
      std::size_t sum = 0;
      for (const std::string& name : source.names()) {
        for (const std::byte each : source.find(name)->bytes)
          sum += static_cast<std::size_t>(each);
      }
      require_holds(sum < SIZE_MAX, "the bytes can be read");
    });
  }));
}

namespace {

constexpr std::size_t small_files = 1200;  // bytes, for several_units() in three files

// Tensors with and without names of their own in files, trained and frozen, a tied one, and opaque bytes.
Model exported_model() {
  Model model = several_units();
  model.units[2].tensors[0].name = "final_norm.weight";
  model.units[3].ties.push_back({"head", 0, 0});
  model.unit("codes", DType::u8);
  model.tensor({.name = "packed", .shape = {5, 3}, .frozen = true});
  return model;
}

const std::vector<std::string> exported_names{"b", "empty", "final_norm.weight", "fixed", "packed", "w", "weight"};

ParameterSource exported_parameters() {
  return [](std::size_t unit, std::size_t tensor, Range range, const View& to) {
    if (to.dtype() != DType::u8) return initial_parameters()(unit, tensor, range, to);
    for (std::size_t i = 0; i < range.count; ++i)
      to.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(range.first + i);
  };
}

std::vector<std::byte> parameters_of(Training& training) {
  std::vector<std::byte> bytes;
  for (std::size_t unit = 0; unit < training.model().units.size(); ++unit)
    add_bytes(training.model().units[unit], training.forward(unit), nullptr, bytes);
  return bytes;
}

// A training of some steps, which ends with an export. Returns the parameters at the end.
std::vector<std::byte> train_and_write(Communicator& world, const fs::path& directory, std::size_t file_bytes,
                                       std::size_t steps = 1) {
  const Model model = exported_model();
  Training training(model, world, {optim::AdamW{.lr = 0.1}}, {.stage = 3, .tile_elements = 256});
  training.start(exported_parameters());
  SyntheticTrainer trainer(model, world.rank());
  for (std::size_t step = 0; step < steps; ++step) {
    trainer.run(training, step);
    training.step();
  }
  safetensors::write(directory, training, {.file_bytes = file_bytes});
  return parameters_of(training);
}

// The bytes of all tensors of an export, and the names of its files.
std::string all_bytes(const fs::path& directory) {
  const Source source(directory);
  std::string bytes;
  for (const std::string& name : source.names()) {
    const auto more = source.find(name)->bytes;
    bytes.append(reinterpret_cast<const char*>(more.data()), more.size());
  }
  return bytes;
}

std::string files_in(const fs::path& directory) {
  std::set<std::string> names;
  for (const auto& each : fs::directory_iterator(directory))
    names.insert(each.path().filename().string());
  return fmt::format("{}", fmt::join(names, " "));
}

std::string files_of_parts(std::size_t parts) {
  std::string names;
  for (std::size_t part = 1; part <= parts; ++part)
    names += fmt::format("model-{:05}-of-{:05}.safetensors ", part, parts);
  return names + "model.safetensors.index.json";
}

}  // namespace

TEST_CASE("what a training writes is read bit by bit, on any number of ranks") {
  const std::size_t ranks = GENERATE(1u, 2u);
  const std::size_t file_bytes = GENERATE(safetensors::WriteOptions{}.file_bytes, small_files);
  CAPTURE(ranks, file_bytes);
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "new" / "export";
  std::vector<std::vector<std::byte>> written(ranks), read_again(3);
  CHECK(failures_of_ranks(ranks, [&](Communicator& world) {
          written[world.rank()] = train_and_write(world, path, file_bytes);
        }) == no_failures(ranks));
  const Source source(path);
  CHECK(source.names() == exported_names);
  CHECK(source.find("final_norm.weight")->format == "F32");
  CHECK(source.find("w")->format == "BF16");
  CHECK(source.find("packed")->format == "U8");
  CHECK(source.find("packed")->shape == std::vector<std::size_t>{5, 3});
  CHECK(contents(path).begin()->second.find(R"("__metadata__":{"format":"pt"})") != std::string::npos);
  CHECK(failures_of_ranks(3, [&](Communicator& world) {
          Training training(exported_model(), world, {optim::AdamW{}}, {.stage = 3, .tile_elements = 128});
          training.start(source.parameters(training.model()));
          read_again[world.rank()] = parameters_of(training);
        }) == no_failures(3));
  for (const auto& each : {written, read_again})
    CHECK((each == std::vector<std::vector<std::byte>>(each.size(), written.front())));
}

TEST_CASE("an export leaves a training as it is") {
  std::vector<std::byte> parameters[2];
  for (const bool writes : {false, true}) {
    const TemporaryDirectory directory;
    CHECK(failures_of_ranks(2, [&](Communicator& world) {
            Training training(two_layers(), world, {optim::AdamW{}}, {.stage = 2, .tile_elements = 256});
            training.start(initial_parameters());
            SyntheticTrainer trainer(training.model(), world.rank());
            for (std::size_t step = 0; step < 3; ++step) {
              trainer.run(training, step);
              const std::string refusal = failure_of([&] { safetensors::write(directory.path(), training); });
              if (refusal.find("B1007 cannot write the parameters: it is in the middle of a step") != 0)
                throw std::logic_error("an export in the middle of a step gave: " + refusal);
              training.step();
              if (writes) safetensors::write(directory.path(), training);
            }
            if (world.rank() == 0) parameters[writes ? 1 : 0] = parameters_of(training);
            if (world.rank() == 1) parameters_of(training);
          }) == no_failures(2));
  }
  CHECK(parameters[0] == parameters[1]);
}

TEST_CASE("an export replaces the one before, and leaves nothing of it") {
  const TemporaryDirectory directory;
  const auto world = single_rank();
  const std::size_t large = safetensors::WriteOptions{}.file_bytes;
  std::ofstream(directory.path() / "config.json") << "{}";
  std::ofstream(directory.path() / "model-00007-of-00009.safetensors.unfinished") << "of a killed job";
  for (const auto& [file_bytes, files] :
       {std::pair(large, std::string("model.safetensors")), std::pair(small_files, files_of_parts(3)),
        std::pair(small_files, files_of_parts(4)), std::pair(small_files, files_of_parts(3)),
        std::pair(large, std::string("model.safetensors"))}) {
    CAPTURE(files);
    train_and_write(*world, directory.path(), file_bytes);
    CHECK(files_in(directory.path()) == "config.json " + files);
    CHECK(Source(directory.path()).names() == exported_names);
  }
  train_and_write(*world, directory.path(), 1);
  CHECK(files_in(directory.path()) == "config.json " + files_of_parts(6));  // each tensor with values has its own file
  write_file(directory.path() / "model-00001-of-00007.safetensors", "of a killed job");
  train_and_write(*world, directory.path(), 1);
  CHECK(files_in(directory.path()) == "config.json " + files_of_parts(8));
  CHECK(Source(directory.path()).names() == exported_names);
}

TEST_CASE("an export that is killed at any call leaves the old one or the new one") {
  const std::size_t large = safetensors::WriteOptions{}.file_bytes;
  const auto [before, after] = GENERATE_COPY(table<std::size_t, std::size_t>(
      {{large, large}, {large, small_files}, {small_files, small_files}, {small_files, large}}));
  CAPTURE(before, after);
  const TemporaryDirectory original, whole;
  train_and_write(*single_rank(), original.path(), before);
  train_and_write(*single_rank(), whole.path(), after, 2);
  const std::string old = all_bytes(original.path()), newer = all_bytes(whole.path());
  REQUIRE(old != newer);
  std::set<std::string> found;
  ChildEnd end = ChildEnd::killed;
  for (std::size_t moment = 1; end == ChildEnd::killed; moment += every(4)) {
    CAPTURE(moment);
    const TemporaryDirectory directory;
    fs::copy(original.path(), directory.path(), fs::copy_options::recursive);
    end = run_killed_at(moment,
                        [&, file_bytes = after] { train_and_write(*single_rank(), directory.path(), file_bytes, 2); });
    if (end == ChildEnd::untraceable) return skip("a process may not trace its child here");
    const std::string now = all_bytes(directory.path());
    CHECK((now == old || now == newer));
    found.insert(now);
  }
  CHECK(end == ChildEnd::done);
  CHECK(found.size() == 2);
}

TEST_CASE("a failure of an export reaches all ranks, and leaves nothing") {
  const TemporaryDirectory directory;
  const auto failures = [&](const fs::path& path, std::size_t fails_at = SIZE_MAX) {
    return failures_of_ranks(2, [&](Communicator& world) {
      FailingCommunicator group(world, world.rank() == 1 ? fails_at : SIZE_MAX);
      train_and_write(group, path, small_files);
    });
  };
  write_file(directory.path() / "file", "");
  for (const std::string& failure : failures(directory.path() / "file" / "below"))
    CHECK_THAT(failure, Contains("B3201 mkdir failed") && Contains("file/below"));
  fs::remove(directory.path() / "file");
  const std::string full = in_a_child([&]() -> std::string {  // as if the drive were full
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1500, 1500};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    return fmt::format("{}", fmt::join(failures(directory.path()), "\n"));
  });
  CHECK_THAT(full, Contains("rank 0: " + directory.path().string() + "/model-00001-of-00003.safetensors.unfinished"));
  CHECK_THAT(full.substr(full.find("B2202") + 1), Contains("B2202 write failed"));  // on the second rank too
  CHECK(files_in(directory.path()).empty());
  std::size_t failed = 0;
  bool has_ended = false;
  for (std::size_t agreement = 1; !has_ended; agreement += every(2)) {
    has_ended = failures(directory.path(), agreement) == no_failures(2);
    failed += has_ended ? 0 : 1;
    REQUIRE(failed < 100);
    CHECK_THAT(files_in(directory.path()), !Contains("unfinished"));
  }
  CHECK(failed > 2);
}

TEST_CASE("tensors of the same name in files are refused") {
  Model model = two_layers();
  model.unit("other");
  model.tensor({"first", {256}});    // so the one of unit h is h.first
  model.tensor({"h.first", {256}});  // its own name
  const auto world = single_rank();
  Training training(model, *world, {optim::AdamW{}}, {});
  training.start(initial_parameters());
  const TemporaryDirectory directory;
  CHECK_THROWS_WITH(safetensors::write(directory.path(), training), Contains("B1001") && Contains("h.first"));
  CHECK(files_in(directory.path()).empty());
}

TEST_CASE("weights go from files to a GPU and back", "[gpu]") {
  const TemporaryDirectory from, to;
  train_and_write(*single_rank(), from.path(), small_files);
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const Stream stream;
  Training training(exported_model(), *world, {optim::AdamW{}}, {.threads = 1, .gpu = 0, .stream = stream.handle()});
  training.start(Source(from.path()).parameters(training.model()));
  safetensors::write(to.path(), training);
  CHECK(all_bytes(to.path()) == all_bytes(from.path()));
}
