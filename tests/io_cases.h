// Malformed .npy and .safetensors files, each with the words its error must contain; used by test_io.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"

namespace scope::io_cases {

struct Malformed {
  std::string name;
  std::string bytes;
  std::string says;  // part of the error's text
  Status status = Status::format;
};

// A number's first `count` bytes, lowest first.
inline std::string little_endian(uint64_t value, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += static_cast<char>(value >> (8 * i) & 255);
  return out;
}

// `length` and `data` as they are: nothing is made to fit.
inline std::string raw_npy(int major, int minor, uint64_t length, const std::string& header, const std::string& data = "") {
  return "\x93NUMPY" + little_endian(major, 1) + little_endian(minor, 1) + little_endian(length, major == 1 ? 2 : 4) +
         header + data;
}

inline std::string npy(const std::string& dictionary, size_t data_bytes, int major = 1) {
  return raw_npy(major, 0, dictionary.size() + 1, dictionary + "\n", std::string(data_bytes, 'x'));
}

// A header whose only fault can be the shape, or the descr.
inline std::string npy_shape(const std::string& shape, size_t data_bytes = 24) {
  return npy("{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + ", }", data_bytes);
}
inline std::string npy_descr(const std::string& descr, size_t data_bytes = 24) {
  return npy("{'descr': " + descr + ", 'fortran_order': False, 'shape': (2, 3), }", data_bytes);
}

inline std::string repeat(const std::string& text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

inline std::vector<Malformed> npy_cases() {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
  const std::string magic = "\x93NUMPY";
  return {
      // The prefix.
      {"empty", "", "0 bytes, expected at least 10"},
      {"one_byte", "\x93", "1 bytes, expected at least 10"},
      {"magic_only", magic, "6 bytes, expected at least 10"},
      {"no_length", magic + std::string("\1\0", 2), "8 bytes, expected at least 10"},
      {"half_length", magic + std::string("\1\0\x10", 3), "9 bytes, expected at least 10"},
      {"version_2_short_length", magic + std::string("\2\0\x10\0", 4), "10 bytes, expected at least 12"},
      {"version_3_short_length", magic + std::string("\3\0\x10\0\0", 5), "11 bytes, expected at least 12"},
      {"text_file", "hello, this is not an array", "expected the magic"},
      {"magic_first_byte", "N" + npy(good, 24), "expected the magic"},
      {"magic_lower_case", "\x93numpy" + npy(good, 24).substr(6), "expected the magic"},
      {"magic_last_byte", "\x93NUMPZ" + npy(good, 24).substr(6), "expected the magic"},
      {"zip_of_arrays", "PK\3\4 an .npz is a zip archive", "expected the magic"},
      {"safetensors_file", little_endian(2, 8) + "{}", "expected the magic"},
      {"leading_byte_order_mark", "\xEF\xBB\xBF" + npy(good, 24), "expected the magic"},
      {"zeros", std::string(64, '\0'), "expected the magic"},
      {"version_0", npy(good, 24, 0), "version 0.0"},
      {"version_4", npy(good, 24, 4), "version 4.0"},
      {"version_255", npy(good, 24, 255), "version 255.0"},
      {"version_1_1", raw_npy(1, 1, good.size() + 1, good + "\n", std::string(24, 'x')), "version 1.1"},
      {"version_3_255", raw_npy(3, 255, good.size() + 1, good + "\n", std::string(24, 'x')), "version 3.255"},
      // The header's length.
      {"length_zero", raw_npy(1, 0, 0, "", ""), "found the header's end at byte 10, expected '{'"},
      {"length_zero_with_data", raw_npy(1, 0, 0, good + "\n", ""), "found the header's end"},
      {"length_past_end", raw_npy(1, 0, 200, good + "\n", std::string(24, 'x')), "passes the end"},
      {"length_one_past_end", raw_npy(1, 0, good.size() + 2, good + "\n", ""), "passes the end"},
      {"length_10001", raw_npy(1, 0, 10001, good + std::string(20000, ' '), ""), "is 10001, expected at most 10000"},
      {"length_65535", raw_npy(1, 0, 65535, good, ""), "is 65535, expected at most"},
      {"length_10001_version_2", raw_npy(2, 0, 10001, good + std::string(20000, ' '), ""), "is 10001, expected at most"},
      {"length_2_31_version_2", raw_npy(2, 0, 0x80000000u, good, ""), "is 2147483648, expected at most"},
      {"length_2_32_less_1_version_3", raw_npy(3, 0, 0xffffffffu, good, ""), "is 4294967295, expected at most"},
      {"length_one_short", raw_npy(1, 0, good.size(), good + "\n", std::string(24, 'x')), "one final newline"},
      {"length_cuts_the_brace", raw_npy(1, 0, good.size() - 1, good, std::string(24, 'x')), "expected a quoted key"},
      {"length_covers_data", raw_npy(1, 0, good.size() + 5, good + "\n", std::string(24, 'x')), "one final newline"},
      // The dictionary.
      {"only_newline", npy("", 0), "expected '{'"},
      {"only_spaces", npy("      ", 0), "expected '{'"},
      {"empty_dictionary", npy("{}", 0), "'descr' is missing"},
      {"list", npy("['descr']", 0), "expected '{'"},
      {"unclosed", npy(good.substr(0, good.size() - 1), 24), "expected a quoted key"},
      {"closed_twice", npy(good + "}", 24), "one final newline"},
      {"second_dictionary", npy(good + good, 24), "one final newline"},
      {"trailing_comment", npy(good + " # note", 24), "one final newline"},
      {"two_newlines", npy(good + "\n", 24), "one final newline"},
      {"no_newline", raw_npy(1, 0, good.size() + 1, good + " ", std::string(24, 'x')), "one final newline"},
      {"zero_padding", npy(good + std::string(4, '\0'), 24), "one final newline"},
      {"tabs", npy("{\t'descr': '<f4'}", 24), "expected a quoted key"},
      {"newline_inside", npy("{'descr': '<f4',\n'fortran_order': False, 'shape': (2, 3)}", 24), "expected a quoted key"},
      {"leading_comma", npy("{, 'descr': '<f4'}", 24), "expected a quoted key"},
      {"double_comma", npy("{'descr': '<f4',, 'shape': (2, 3)}", 24), "expected a quoted key"},
      {"missing_comma", npy("{'descr': '<f4' 'shape': (2, 3)}", 24), "expected '}'"},
      {"missing_colon", npy("{'descr' '<f4'}", 24), "expected ':'"},
      {"equals_sign", npy("{'descr' = '<f4'}", 24), "expected ':'"},
      {"bare_key", npy("{descr: '<f4'}", 24), "expected a quoted key"},
      {"number_key", npy("{1: '<f4'}", 24), "expected a quoted key"},
      {"bytes_key", npy("{b'descr': '<f4'}", 24), "expected a quoted key"},
      {"unclosed_key", npy("{'descr: <f4}", 24), "expected a closing quote"},
      {"mixed_quotes", npy("{'descr\": <f4}", 24), "expected a closing quote"},
      {"unknown_key", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), 'x': 1}", 24), "unknown key 'x'"},
      {"key_upper_case", npy("{'Descr': '<f4'}", 24), "unknown key 'Descr'"},
      {"key_with_space", npy("{'descr ': '<f4'}", 24), "unknown key 'descr '"},
      {"key_with_zero", npy(std::string("{'descr\0': '<f4'}", 17), 24), "unknown key 'descr?'"},
      {"key_with_escape", npy("{'\\x64escr': '<f4'}", 24), "unknown key"},
      {"key_empty", npy("{'': '<f4'}", 24), "unknown key ''"},
      {"key_not_ascii", npy("{'d\xC3\xA9scr': '<f4'}", 24, 3), "unknown key 'd??scr'"},
      {"key_long", npy("{'" + std::string(5000, 'k') + "': 1}", 24), "kkk...'"},
      {"no_descr", npy("{'fortran_order': False, 'shape': (2, 3), }", 24), "'descr' is missing"},
      {"no_order", npy("{'descr': '<f4', 'shape': (2, 3), }", 24), "'fortran_order' is missing"},
      {"no_shape", npy("{'descr': '<f4', 'fortran_order': False, }", 24), "'shape' is missing"},
      {"descr_twice", npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}", 24),
       "'descr' appears twice"},
      {"order_twice", npy("{'descr': '<f4', 'fortran_order': False, 'fortran_order': False, 'shape': (2, 3)}", 24),
       "'fortran_order' appears twice"},
      {"shape_twice", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), 'shape': (2, 3)}", 24),
       "'shape' appears twice"},
      // fortran_order.
      {"order_true", npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}", 24), "'fortran_order' is True"},
      {"order_lower_case", npy("{'descr': '<f4', 'fortran_order': false, 'shape': (2, 3)}", 24), "expected True or False"},
      {"order_number", npy("{'descr': '<f4', 'fortran_order': 0, 'shape': (2, 3)}", 24), "expected True or False"},
      {"order_none", npy("{'descr': '<f4', 'fortran_order': None, 'shape': (2, 3)}", 24), "expected True or False"},
      {"order_quoted", npy("{'descr': '<f4', 'fortran_order': 'False', 'shape': (2, 3)}", 24), "expected True or False"},
      {"order_longer_word", npy("{'descr': '<f4', 'fortran_order': Falsely, 'shape': (2, 3)}", 24), "expected '}'"},
      {"order_missing_value", npy("{'descr': '<f4', 'fortran_order': , 'shape': (2, 3)}", 24), "expected True or False"},
      // descr.
      {"descr_big_endian", npy_descr("'>f4'"), "'>f4' (big-endian)"},
      {"descr_big_endian_integer", npy_descr("'>i8'", 48), "'>i8' (big-endian)"},
      {"descr_object", npy_descr("'|O'"), "'|O' (Python objects)"},
      {"descr_object_sized", npy_descr("'|O8'"), "'|O8' (Python objects)"},
      {"descr_object_bare", npy_descr("'O'"), "'O' (Python objects)"},
      {"descr_native_order", npy_descr("'=f4'"), "'=f4', expected one of"},
      {"descr_no_order", npy_descr("'f4'"), "'f4', expected one of"},
      {"descr_wrong_bar", npy_descr("'|f4'"), "'|f4', expected one of"},
      {"descr_f16_bytes", npy_descr("'<f16'", 96), "'<f16', expected one of"},
      {"descr_f3", npy_descr("'<f3'"), "'<f3', expected one of"},
      {"descr_complex", npy_descr("'<c8'", 48), "'<c8', expected one of"},
      {"descr_text", npy_descr("'<U4'"), "'<U4', expected one of"},
      {"descr_bytes", npy_descr("'|S4'"), "'|S4', expected one of"},
      {"descr_void", npy_descr("'|V2'"), "'|V2', expected one of"},
      {"descr_time", npy_descr("'<M8[ns]'"), "'<M8[ns]', expected one of"},
      {"descr_name", npy_descr("'float32'"), "'float32', expected one of"},
      {"descr_bfloat16", npy_descr("'bfloat16'"), "'bfloat16', expected one of"},
      {"descr_empty", npy_descr("''"), "'', expected one of"},
      {"descr_trailing_space", npy_descr("'<f4 '"), "'<f4 ', expected one of"},
      {"descr_negative", npy_descr("'<f-4'"), "'<f-4', expected one of"},
      {"descr_huge", npy_descr("'<f99999999999999999999'"), "expected one of"},
      {"descr_structured", npy_descr("[('a', '<f4')]"), "structured types are not supported"},
      {"descr_tuple", npy_descr("('<f4', (2,))"), "structured types are not supported"},
      {"descr_none", npy_descr("None"), "expected a quoted 'descr'"},
      {"descr_control_characters", npy_descr("'\x1b[31m'"), "'?[31m', expected one of"},
      // shape.
      {"shape_list", npy_shape("[2, 3]"), "expected '('"},
      {"shape_number", npy_shape("6"), "expected '('"},
      {"shape_none", npy_shape("None"), "expected '('"},
      {"shape_not_a_tuple", npy_shape("(6)"), "',' after a single dimension"},
      {"shape_comma_only", npy_shape("(,)"), "expected a dimension"},
      {"shape_double_comma", npy_shape("(2,,3)"), "expected a dimension"},
      {"shape_leading_comma", npy_shape("(,6)"), "expected a dimension"},
      {"shape_no_comma", npy_shape("(2 3)"), "',' after a single dimension"},
      {"shape_third_no_comma", npy_shape("(1, 2 3)"), "expected ')'"},
      {"shape_unclosed", npy_shape("(2, 3"), "expected a dimension"},
      {"shape_wrong_close", npy_shape("(2, 3]"), "expected ')'"},
      {"shape_nested", npy_shape("((2, 3))"), "expected a dimension"},
      {"shape_deep", npy_shape(std::string(9000, '(')), "expected a dimension"},
      {"shape_negative", npy_shape("(-2, -3)"), "expected a dimension"},
      {"shape_minus_zero", npy_shape("(-0,)", 0), "expected a dimension"},
      {"shape_plus", npy_shape("(+6,)"), "expected a dimension"},
      {"shape_float", npy_shape("(6.0,)"), "',' after a single dimension"},
      {"shape_exponent", npy_shape("(6e0,)"), "',' after a single dimension"},
      {"shape_hexadecimal", npy_shape("(0x6,)"), "',' after a single dimension"},
      {"shape_underscore", npy_shape("(1_0,)", 40), "',' after a single dimension"},
      {"shape_python_2_long", npy_shape("(6L,)"), "',' after a single dimension"},
      {"shape_leading_zero", npy_shape("(06,)"), "expected a dimension"},
      {"shape_double_zero", npy_shape("(00,)", 0), "expected a dimension"},
      {"shape_quoted", npy_shape("('6',)"), "expected a dimension"},
      {"shape_2_63", npy_shape("(9223372036854775808,)"), "expected a dimension"},
      {"shape_2_64", npy_shape("(18446744073709551616,)"), "expected a dimension"},
      {"shape_2_64_plus_6", npy_shape("(18446744073709551622,)"), "expected a dimension"},
      {"shape_many_digits", npy_shape("(" + std::string(9000, '9') + ",)"), "expected a dimension"},
      {"shape_2_63_less_1", npy_shape("(9223372036854775807,)"), "overflows"},
      {"shape_product_wraps_to_zero", npy_shape("(4294967296, 4294967296)", 0), "overflows"},
      {"shape_product_wraps_to_24", npy_shape("(4611686018427387910,)"), "overflows"},
      {"shape_overflow_before_zero", npy_shape("(9223372036854775807, 0)", 0), "overflows"},
      {"shape_large", npy_shape("(2305843009213693951,)"), "24 bytes of data"},
      {"shape_terabyte", npy_shape("(1048576, 262144)"), "24 bytes of data"},
      {"shape_rank_9", npy_shape("(1, 1, 1, 1, 1, 1, 1, 2, 3)"), "at most 8 dimensions"},
      {"shape_rank_3000", npy_shape("(" + repeat("1, ", 3000) + ")", 4), "at most 8 dimensions"},
      // The data.
      {"data_missing", npy_shape("(2, 3)", 0), "0 bytes of data"},
      {"data_one_short", npy_shape("(2, 3)", 23), "23 bytes of data"},
      {"data_one_over", npy_shape("(2, 3)", 25), "25 bytes of data"},
      {"data_second_array", npy(good, 24) + npy(good, 24), "expects 24"},
      {"data_scalar_missing", npy_shape("()", 0), "expects 4"},
      {"data_for_empty", npy_shape("(0, 3)", 4), "expects 0"},
      {"data_of_double", npy_descr("'<f8'", 24), "expects 48"},
      {"data_of_bool", npy_descr("'|b1'", 24), "expects 6"},
  };
}

inline std::string raw_safetensors(uint64_t length, const std::string& header, const std::string& data = "") {
  return little_endian(length, 8) + header + data;
}

inline std::string safetensors(const std::string& header, size_t data_bytes = 0) {
  return raw_safetensors(header.size(), header, std::string(data_bytes, 'x'));
}

// A file with one tensor 'a' made of these fields.
inline std::string one_tensor(const std::string& fields, size_t data_bytes = 8) {
  return safetensors("{\"a\":{" + fields + "}}", data_bytes);
}
inline std::string dtype(const std::string& value) {
  return one_tensor("\"dtype\":" + value + R"(,"shape":[2],"data_offsets":[0,8])");
}
inline std::string shape(const std::string& value, size_t data_bytes = 8) {
  return one_tensor(R"("dtype":"F32","data_offsets":[0,)" + std::to_string(data_bytes) + "],\"shape\":" + value, data_bytes);
}
inline std::string offsets(const std::string& value, size_t data_bytes = 8) {
  return one_tensor(R"("dtype":"F32","shape":[2],"data_offsets":)" + value, data_bytes);
}
// Tensors 'a', 'b', … of bytes, from "begin,end" each.
inline std::string layout(const std::vector<std::pair<int, int>>& ranges, size_t data_bytes) {
  std::string items;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto [begin, end] = ranges[i];
    items += std::string(i > 0 ? "," : "") + "\"" + static_cast<char>('a' + i) + R"(":{"dtype":"U8","shape":[)" +
             std::to_string(end - begin) + "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  }
  return safetensors("{" + items + "}", data_bytes);
}
inline std::string metadata(const std::string& value) { return safetensors("{\"__metadata__\":" + value + "}"); }

inline std::vector<Malformed> safetensors_cases() {
  const std::string fields = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  const std::string tensor = "{" + fields + "}";
  const std::string good = "{\"a\":" + tensor + "}";
  std::string many_tensors = "{", many_entries = "{";
  for (int i = 0; i <= 65536; ++i) {
    many_tensors += fmt::format(R"("{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}},)", i);
    many_entries += fmt::format(R"("{}":"",)", i);
  }
  many_tensors.back() = '}';
  many_entries.back() = '}';
  return {
      // The length.
      {"empty", "", "0 bytes, expected at least 8"},
      {"seven_bytes", std::string(7, '\0'), "7 bytes, expected at least 8"},
      {"length_zero", raw_safetensors(0, ""), "expected '{'"},
      {"length_zero_with_data", raw_safetensors(0, good), "expected '{'"},
      {"length_past_end", raw_safetensors(3, "{}"), "passes the end"},
      {"length_without_header", raw_safetensors(100, ""), "passes the end"},
      {"length_16_mib_without_header", raw_safetensors(16 << 20, "{}"), "passes the end"},
      {"length_over_16_mib", raw_safetensors((16 << 20) + 1, "{}"), "is 16777217, expected at most 16777216"},
      {"length_2_32", raw_safetensors(uint64_t{1} << 32, "{}"), "expected at most"},
      {"length_2_63_less_1", raw_safetensors(~uint64_t{0} >> 1, "{}"), "expected at most"},
      {"length_2_63", raw_safetensors(uint64_t{1} << 63, "{}"), "expected at most"},
      {"length_2_64_less_8", raw_safetensors(~uint64_t{7}, "{}"), "expected at most"},
      {"length_2_64_less_1", raw_safetensors(~uint64_t{0}, "{}"), "expected at most"},
      {"length_cuts_the_header", raw_safetensors(good.size() - 1, good, std::string(8, 'x')), "not JSON"},
      {"length_covers_data", raw_safetensors(good.size() + 1, good, std::string(9, 'x')), "not JSON"},
      {"numpy_file", "\x93NUMPY" + std::string("\1\0", 2) + "{'descr'", "expected at most"},
      {"zip_file", std::string("PK\3\4\0\0\0\0", 8) + "pickle", "expected at most"},
      // The JSON.
      {"leading_space", safetensors(" " + good, 8), "begins with ' ', expected '{'"},
      {"leading_byte_order_mark", safetensors("\xEF\xBB\xBF" + good, 8), "expected '{'"},
      {"leading_zero_byte", safetensors(std::string(1, '\0') + good, 8), "expected '{'"},
      {"array", safetensors("[]"), "begins with '[', expected '{'"},
      {"null", safetensors("null"), "expected '{'"},
      {"text", safetensors("\"a\""), "expected '{'"},
      {"number", safetensors("12"), "expected '{'"},
      {"only_spaces", safetensors("        "), "expected '{'"},
      {"brace_only", safetensors("{"), "not JSON at byte"},
      {"unclosed", safetensors("{\"a\":" + tensor, 8), "not JSON"},
      {"closed_twice", safetensors(good + "}", 8), "not JSON"},
      {"second_object", safetensors(good + good, 8), "not JSON"},
      {"trailing_comma", safetensors("{\"a\":" + tensor + ",}", 8), "not JSON"},
      {"trailing_text", safetensors(good + " x", 8), "not JSON"},
      {"trailing_zero", safetensors(good + std::string(1, '\0'), 8), "zero at byte"},
      {"zero_hides_text", safetensors(good + std::string("\0{{{", 4), 8), "zero at byte"},
      {"zero_in_a_name", safetensors(std::string("{\"\0\":1}", 7), 8), "zero at byte 10"},
      {"leading_comma", safetensors("{,\"a\":" + tensor + "}", 8), "not JSON"},
      {"missing_colon", safetensors("{\"a\"" + tensor + "}", 8), "not JSON"},
      {"single_quotes", safetensors("{'a':" + tensor + "}", 8), "not JSON"},
      {"bare_key", safetensors("{a:" + tensor + "}", 8), "not JSON"},
      {"line_comment", safetensors(good + "// note\n", 8), "not JSON"},
      {"block_comment", safetensors("{/* note */\"a\":" + tensor + "}", 8), "not JSON"},
      {"not_utf_8", safetensors("{\"\xff\":" + tensor + "}", 8), "UTF-8"},
      {"overlong_utf_8", safetensors("{\"\xc0\x80\":" + tensor + "}", 8), "UTF-8"},
      {"utf_8_surrogate", safetensors("{\"\xed\xa0\x80\":" + tensor + "}", 8), "UTF-8"},
      {"utf_8_cut", safetensors("{\"\xe2\x82\":" + tensor + "}", 8), "UTF-8"},
      {"lone_surrogate_escape", safetensors(R"({"\ud800":)" + tensor + "}", 8), "not JSON"},
      {"reversed_surrogates", safetensors(R"({"\udc00\ud800":)" + tensor + "}", 8), "not JSON"},
      {"bad_escape", safetensors(R"({"\q":)" + tensor + "}", 8), "not JSON"},
      {"short_escape", safetensors(R"({"\u12":)" + tensor + "}", 8), "not JSON"},
      {"raw_newline_in_a_name", safetensors("{\"\n\":" + tensor + "}", 8), "not JSON"},
      {"nan", offsets("[0,NaN]"), "not JSON"},
      {"utf_16", safetensors(std::string("{\0\"\0a\0", 6), 8), "zero at byte"},
      {"deep_arrays", safetensors("{\"a\":" + std::string(1 << 20, '[')), "found an array, expected an object"},
      {"deep_arrays_in_shape", shape(std::string(1 << 20, '[')), "'shape': found an array"},
      {"deep_objects", safetensors("{" + repeat("\"a\":{", 100000)), "'a', 'a': unknown field"},
      {"deep_objects_in_dtype", safetensors("{" + repeat("\"dtype\":{", 100000)), "found an object, expected a string"},
      {"deep_objects_in_metadata", safetensors("{" + repeat("\"__metadata__\":{", 100000)),
       "found an object, expected a string"},
      // The top object.
      {"tensor_null", safetensors(R"({"a":null})"), "'a': found null, expected an object"},
      {"tensor_true", safetensors(R"({"a":true})"), "'a': found true, expected an object"},
      {"tensor_number", safetensors(R"({"a":1})"), "'a': found the number 1, expected an object"},
      {"tensor_negative", safetensors(R"({"a":-1})"), "'a': found the number -1, expected an object"},
      {"tensor_float", safetensors(R"({"a":1.5})"), "'a': found the number 1.5, expected an object"},
      {"tensor_text", safetensors(R"({"a":"F32"})"), "'a': found a string, expected an object"},
      {"tensor_array", safetensors(R"({"a":[]})"), "'a': found an array, expected an object"},
      {"tensor_empty", safetensors(R"({"a":{}})"), "'dtype' is missing"},
      {"tensor_twice", safetensors("{\"a\":" + tensor + ",\"a\":" + tensor + "}", 8), "key 'a' appears twice"},
      {"tensor_twice_apart", safetensors("{\"a\":" + tensor + ",\"b\":" + tensor + ",\"a\":" + tensor + "}", 8),
       "appears twice"},
      {"tensor_twice_escaped", safetensors("{\"a\":" + tensor + ",\"\\u0061\":" + tensor + "}", 8), "key 'a' appears twice"},
      {"tensor_twice_unnamed", safetensors("{\"\":" + tensor + ",\"\":" + tensor + "}", 8), "key '' appears twice"},
      {"tensors_65537", safetensors(many_tensors), "more than 65536 tensors"},
      {"name_long", safetensors("{\"" + std::string(100000, 'n') + "\":1}"), "nnn...'"},
      {"name_with_control_characters", safetensors(R"({"\u001b[31m":1})"), "'?[31m': found"},
      // A tensor's fields.
      {"no_dtype", one_tensor(R"("shape":[2],"data_offsets":[0,8])"), "tensor 'a': field 'dtype' is missing"},
      {"no_shape", one_tensor(R"("dtype":"F32","data_offsets":[0,8])"), "tensor 'a': field 'shape' is missing"},
      {"no_offsets", one_tensor(R"("dtype":"F32","shape":[2])"), "tensor 'a': field 'data_offsets' is missing"},
      {"dtype_twice", one_tensor(fields + R"(,"dtype":"F32")"), "key 'dtype' appears twice"},
      {"shape_twice", one_tensor(fields + R"(,"shape":[2])"), "key 'shape' appears twice"},
      {"offsets_twice", one_tensor(fields + R"(,"data_offsets":[0,8])"), "key 'data_offsets' appears twice"},
      {"unknown_field", one_tensor(fields + R"(,"strides":[1])"), "'strides': unknown field"},
      {"field_upper_case", one_tensor(R"("DType":"F32")"), "'DType': unknown field"},
      {"field_empty", one_tensor(fields + R"(,"":0)"), "unknown field"},
      {"metadata_in_a_tensor", one_tensor(fields + R"(,"__metadata__":{})"), "'__metadata__': unknown field"},
      {"dtype_unknown", dtype("\"F33\""), "tensor 'a', 'dtype': 'F33', expected F64"},
      {"dtype_lower_case", dtype("\"f32\""), "'f32', expected F64"},
      {"dtype_numpy", dtype("\"<f4\""), "'<f4', expected F64"},
      {"dtype_f8_e4m3", dtype("\"F8_E4M3\""), "'F8_E4M3', expected F64"},
      {"dtype_f8_e5m2", dtype("\"F8_E5M2\""), "'F8_E5M2', expected F64"},
      {"dtype_complex", dtype("\"C64\""), "'C64', expected F64"},
      {"dtype_empty", dtype("\"\""), "'', expected F64"},
      {"dtype_trailing_space", dtype("\"F32 \""), "'F32 ', expected F64"},
      {"dtype_escaped_zero", dtype(R"("F32\u0000")"), "'F32?', expected F64"},
      {"dtype_null", dtype("null"), "'dtype': found null, expected a string"},
      {"dtype_number", dtype("4"), "'dtype': found the number 4, expected a string"},
      {"dtype_array", dtype("[\"F32\"]"), "'dtype': found an array, expected a string"},
      {"dtype_object", dtype("{}"), "'dtype': found an object, expected a string"},
      {"shape_null", shape("null"), "'shape': found null, expected an array"},
      {"shape_number", shape("2"), "'shape': found the number 2, expected an array"},
      {"shape_text", shape("\"2\""), "'shape': found a string, expected an array"},
      {"shape_object", shape("{}"), "'shape': found an object, expected an array"},
      {"shape_of_text", shape("[\"2\"]"), "'shape': found a string, expected an integer"},
      {"shape_of_null", shape("[null]"), "'shape': found null, expected an integer"},
      {"shape_of_bool", shape("[true,2]"), "'shape': found true, expected an integer"},
      {"shape_of_array", shape("[[2]]"), "'shape': found an array, expected an integer"},
      {"shape_of_object", shape("[{}]"), "'shape': found an object, expected an integer"},
      {"shape_negative", shape("[-2]"), "found the number -2, expected an integer"},
      {"shape_both_negative", shape("[-1,-2]"), "found the number -1, expected an integer"},
      {"shape_minus_zero", shape("[-0]", 0), "found the number 0, expected an integer"},
      {"shape_float", shape("[2.0]"), "found the number 2.0, expected an integer"},
      {"shape_exponent", shape("[2e0]"), "found the number 2e0, expected an integer"},
      {"shape_leading_zero", shape("[02]"), "not JSON"},
      {"shape_plus", shape("[+2]"), "not JSON"},
      {"shape_2_63", shape("[9223372036854775808]"), "found the number 9223372036854775808"},
      {"shape_2_64", shape("[18446744073709551616]"), "expected an integer"},
      {"shape_many_digits", shape("[" + std::string(100000, '9') + "]"), "number overflow"},
      {"shape_float_overflow", shape("[1e999]"), "not JSON"},
      {"shape_overflows", shape("[9223372036854775807]"), "tensor 'a': shape (9223372036854775807) of f32 overflows"},
      {"shape_product_wraps_to_zero", shape("[4294967296,4294967296]", 0), "overflows"},
      {"shape_product_wraps_to_8", shape("[4611686018427387906]"), "overflows"},
      {"shape_overflow_before_zero", shape("[9223372036854775807,0]", 0), "overflows"},
      {"shape_rank_9", shape("[1,1,1,1,1,1,1,1,2]"), "more than 8 numbers"},
      {"shape_rank_million", shape("[" + repeat("1,", 1000000) + "2]"), "more than 8 numbers"},
      {"shape_too_large", shape("[3]"), "8 bytes of data, shape (3) of f32 expects 12"},
      {"shape_too_small", shape("[1]"), "expects 4"},
      {"shape_scalar_of_8_bytes", shape("[]"), "expects 4"},
      {"shape_empty_of_8_bytes", shape("[0]"), "expects 0"},
      {"offsets_null", offsets("null"), "'data_offsets': found null, expected an array"},
      {"offsets_number", offsets("8"), "'data_offsets': found the number 8"},
      {"offsets_object", offsets("{}"), "'data_offsets': found an object"},
      {"offsets_none", offsets("[]"), "'data_offsets': 0 numbers, expected 2"},
      {"offsets_one", offsets("[0]"), "'data_offsets': 1 numbers, expected 2"},
      {"offsets_three", offsets("[0,8,8]"), "more than 2 numbers"},
      {"offsets_text", offsets("[\"0\",\"8\"]"), "found a string, expected an integer"},
      {"offsets_float", offsets("[0,8.0]"), "found the number 8.0"},
      {"offsets_negative", offsets("[-8,0]"), "found the number -8"},
      {"offsets_swapped", offsets("[8,0]"), "begins at data byte 8, expected 0 (a hole)"},
      {"offsets_end_before_begin", layout({{0, 4}, {4, 2}}, 4), "found the number -2"},
      {"offsets_reversed_range",
       safetensors(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                   R"("b":{"dtype":"U8","shape":[0],"data_offsets":[4,2]}})",
                   4),
       "tensor 'b': ends at data byte 2, expected 4 to 4"},
      {"offsets_past_end", offsets("[0,16]"), "ends at data byte 16, expected 0 to 8"},
      {"offsets_2_63_less_1", offsets("[0,9223372036854775807]"), "ends at data byte 9223372036854775807"},
      {"offsets_2_63", offsets("[0,9223372036854775808]"), "expected an integer"},
      {"offsets_2_64", offsets("[0,18446744073709551624]"), "expected an integer"},
      {"offsets_begin_2_63_less_1", offsets("[9223372036854775807,9223372036854775807]"), "a hole"},
      // Layout.
      {"data_without_tensors", safetensors("{}", 1), "1 bytes of data, the tensors cover 0"},
      {"data_after_metadata", safetensors(R"({"__metadata__":{}})", 8), "8 bytes of data, the tensors cover 0"},
      {"data_missing", safetensors(good, 0), "ends at data byte 8, expected 0 to 0"},
      {"data_one_short", safetensors(good, 7), "ends at data byte 8, expected 0 to 7"},
      {"data_one_over", safetensors(good, 9), "9 bytes of data, the tensors cover 8"},
      {"second_file", safetensors(good, 8) + safetensors(good, 8), "the tensors cover 8"},
      {"hole_at_start", layout({{1, 4}}, 4), "tensor 'a': begins at data byte 1, expected 0 (a hole)"},
      {"hole_inside", layout({{0, 2}, {3, 4}}, 4), "tensor 'b': begins at data byte 3, expected 2 (a hole)"},
      {"hole_at_end", layout({{0, 2}, {2, 3}}, 4), "4 bytes of data, the tensors cover 3"},
      {"hole_for_padding", layout({{0, 3}, {8, 16}}, 16), "a hole"},
      {"hole_before_an_empty", layout({{0, 2}, {3, 3}}, 2), "a hole"},
      {"overlap", layout({{0, 3}, {2, 4}}, 4), "tensor 'b': begins at data byte 2, expected 3 (an overlap)"},
      {"overlap_whole", layout({{0, 4}, {0, 4}}, 4), "tensor 'b': begins at data byte 0, expected 4 (an overlap)"},
      {"overlap_inside", layout({{0, 4}, {1, 2}}, 4), "an overlap"},
      {"overlap_and_hole", layout({{0, 2}, {1, 3}, {4, 5}}, 5), "an overlap"},
      {"overlap_by_an_empty", layout({{0, 4}, {2, 2}}, 4), "an overlap"},
      {"overlap_three", layout({{0, 4}, {4, 8}, {3, 8}}, 8), "an overlap"},
      {"out_of_order_overlap", layout({{2, 4}, {0, 3}}, 4), "tensor 'a': begins at data byte 2, expected 3 (an overlap)"},
      // Metadata.
      {"metadata_null", metadata("null"), "'__metadata__': found null, expected an object"},
      {"metadata_text", metadata("\"pt\""), "'__metadata__': found a string, expected an object"},
      {"metadata_array", metadata("[]"), "'__metadata__': found an array, expected an object"},
      {"metadata_of_number", metadata(R"({"step":3})"),
       "metadata '__metadata__', 'step': found the number 3, expected a string"},
      {"metadata_of_float", metadata(R"({"loss":0.5})"), "'loss': found the number 0.5, expected a string"},
      {"metadata_of_bool", metadata(R"({"ema":true})"), "'ema': found true, expected a string"},
      {"metadata_of_null", metadata(R"({"x":null})"), "'x': found null, expected a string"},
      {"metadata_of_array", metadata(R"({"x":[]})"), "'x': found an array, expected a string"},
      {"metadata_of_object", metadata(R"({"x":{}})"), "'x': found an object, expected a string"},
      {"metadata_second_value", metadata(R"({"x":"","y":1})"), "'y': found the number 1"},
      {"metadata_key_twice", metadata(R"({"x":"1","x":"1"})"), "key 'x' appears twice"},
      {"metadata_twice", safetensors(R"({"__metadata__":{},"__metadata__":{}})"), "key '__metadata__' appears twice"},
      {"metadata_twice_escaped", safetensors(R"({"__metadata__":{},"\u005f_metadata__":{}})"), "appears twice"},
      {"metadata_as_a_tensor", safetensors("{\"__metadata__\":" + tensor + "}", 8),
       "'shape': found an array, expected a string"},
      {"metadata_65537", metadata(many_entries), "more than 65536 metadata entries"},
  };
}

}  // namespace scope::io_cases
