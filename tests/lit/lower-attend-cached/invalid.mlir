// RUN: not gossamer-opt %s -p 'expose-storage' 2>&1 | filecheck %s

// CHECK: has a score function [1.250000e-01, "add"]
func.func @region(%q: tensor<?xf32>, %k: tensor<?xf32>, %v: tensor<?xf32>, %s0: index, %s1: index, %s2: index, %s3: index, %s4: index, %s5: index, %s6: index, %s7: index, %s8: index, %s9: index, %s10: index, %s11: index, %s12: index, %s13: index, %s14: index, %s15: index, %s16: index, %s17: index, %s18: index) -> tensor<?xf32> {
  %y = "kernel.attend_cached"(%q, %k, %v, %s0, %s1, %s2, %s3, %s4, %s5, %s6, %s7, %s8, %s9, %s10, %s11, %s12, %s13, %s14, %s15, %s16, %s17, %s18) {
    operandSegmentSizes = array<i32: 1, 1, 1, 0, 19>, head_size = 64 : i64, group = 2 : i64, queries = 1 : i64, score = [0.125, "add"]
  } : (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index, index) -> tensor<?xf32>
  return %y : tensor<?xf32>
}
