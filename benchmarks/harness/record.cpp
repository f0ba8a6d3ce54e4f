#include "benchmarks/harness/record.h"

#include <ballast/error.h>

#include <nlohmann/json.hpp>

namespace ballast::benchmarks {
namespace {

using Json = nlohmann::ordered_json;

Json ratio_of(const Record& record) { return record.ratio ? Json(*record.ratio) : Json(nullptr); }

Json fields(const Record& record) {
  return {{"suite", record.suite},     {"case", record.name},       {"value", record.value},
          {"unit", record.unit},       {"against", record.against}, {"ratio", ratio_of(record)},
          {"machine", record.machine}, {"commit", record.commit}};
}

Measurement read(const Json& json) {
  Measurement result;
  auto& record = result.record;
  json.at("suite").get_to(record.suite);
  json.at("case").get_to(record.name);
  json.at("value").get_to(record.value);
  json.at("unit").get_to(record.unit);
  record.against = json.value("against", "");
  if (const auto ratio = json.find("ratio"); ratio != json.end() && !ratio->is_null()) {
    record.ratio = ratio->get<double>();
  }
  record.machine = json.value("machine", "");
  record.commit = json.value("commit", "");
  result.against_value = json.value("against_value", 0.0);
  result.spread = json.value("spread", 0.0);
  return result;
}

}  // namespace

std::string to_json(const Record& record) { return fields(record).dump(); }

std::string to_json(const Measurement& measurement) {
  Json json = fields(measurement.record);
  json["against_value"] = measurement.against_value;
  json["spread"] = measurement.spread;
  return json.dump();
}

Measurement measurement_from_json(std::string_view line, std::string_view place) {
  try {
    return read(Json::parse(line));
  } catch (const nlohmann::json::exception& problem) {
    fail(Code::bad_argument, {.what = "a line is not the record of a benchmark case",
                              .where = std::string(place),
                              .needed = "a JSON object with suite, case, value and unit",
                              .available = problem.what()});
  }
}

}  // namespace ballast::benchmarks
