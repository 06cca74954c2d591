// What is rounded to a narrow float and widened again at once stays wide; the last rounding remains.
// RUN: gossamer-opt %s -p 'keep-wide,canonicalize' --split-input-file | filecheck %s

// CHECK-LABEL: func.func @between(
// CHECK-SAME:    %[[X:.*]]: vector<4xf32>, %[[B:.*]]: vector<4xf32>
// CHECK-NEXT:    %[[SUM:.*]] = arith.addf %[[X]], %[[B]]
// CHECK-NEXT:    %[[Y:.*]] = math.erf %[[SUM]]
// CHECK-NEXT:    %[[Z:.*]] = arith.truncf %[[Y]] : vector<4xf32> to vector<4xbf16>
// CHECK-NEXT:    return %[[Z]]
func.func @between(%x: vector<4xf32>, %b: vector<4xf32>) -> vector<4xbf16> {
  %0 = arith.addf %x, %b : vector<4xf32>
  %1 = arith.truncf %0 : vector<4xf32> to vector<4xbf16>
  %2 = arith.extf %1 : vector<4xbf16> to vector<4xf32>
  %3 = math.erf %2 : vector<4xf32>
  %4 = arith.truncf %3 : vector<4xf32> to vector<4xbf16>
  return %4 : vector<4xbf16>
}

// -----

// Scalars of f16, too. A value that is widened to another type, or was rounded to f32, keeps its rounding.
// CHECK-LABEL: func.func @scalars(
// CHECK-SAME:    %[[A:.*]]: f32, %[[D:.*]]: f64
// CHECK-DAG:     %[[H:.*]] = arith.truncf %[[A]] : f32 to f16
// CHECK-DAG:     %[[W:.*]] = arith.extf %[[H]] : f16 to f64
// CHECK-DAG:     %[[S:.*]] = arith.truncf %[[D]] : f64 to f32
// CHECK-DAG:     %[[T:.*]] = arith.extf %[[S]] : f32 to f64
// CHECK:         return %[[A]], %[[W]], %[[T]]
func.func @scalars(%a: f32, %d: f64) -> (f32, f64, f64) {
  %0 = arith.truncf %a : f32 to f16
  %1 = arith.extf %0 : f16 to f32
  %2 = arith.extf %0 : f16 to f64
  %3 = arith.truncf %d : f64 to f32
  %4 = arith.extf %3 : f32 to f64
  return %1, %2, %4 : f32, f64, f64
}

// -----

// A number that is added or multiplied keeps the digits that f32 has. A bound stays rounded.
// CHECK-LABEL: func.func @numbers(
// CHECK-SAME:    %[[X:.*]]: f32
// CHECK-DAG:     %[[NUMBER:.*]] = arith.constant 1.000000e+05 : f64
// CHECK-DAG:     %[[FACTOR:.*]] = arith.constant 1.000000e+05 : f32
// CHECK-NEXT:    %[[Y:.*]] = arith.mulf %[[X]], %[[FACTOR]]
// CHECK-NEXT:    %[[H:.*]] = arith.truncf %[[NUMBER]] : f64 to f16
// CHECK-NEXT:    %[[BOUND:.*]] = arith.extf %[[H]] : f16 to f32
// CHECK-NEXT:    arith.minimumf %[[Y]], %[[BOUND]]
func.func @numbers(%x: f32) -> f32 {
  %cst = arith.constant 1.0e+05 : f64
  %0 = arith.truncf %cst : f64 to f16
  %1 = arith.extf %0 : f16 to f32
  %2 = arith.mulf %x, %1 : f32
  %3 = arith.truncf %cst : f64 to f16
  %4 = arith.extf %3 : f16 to f32
  %5 = arith.minimumf %2, %4 : f32
  return %5 : f32
}
