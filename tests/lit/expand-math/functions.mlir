// exp, erf and tanh of vectors of f32 become a few multiply-adds; the rest is left to the C library.
// RUN: gossamer-opt %s -p 'expand-math,canonicalize' --split-input-file | filecheck %s

// exp(x) = 2^n exp(r) with r = x - n log 2, the power of two in two factors; NaN is kept.
// CHECK-LABEL: func.func @exp(
// CHECK:         %[[HIGH:.*]] = arith.minnumf %arg0, %{{.*}} : vector<4xf32>
// CHECK:         %[[X:.*]] = arith.maxnumf %[[HIGH]]
// CHECK:         %[[N:.*]] = math.roundeven
// CHECK:         %[[R:.*]] = vector.fma %[[N]], %{{.*}}, %[[X]]
// CHECK:         arith.fptosi %[[N]] : vector<4xf32> to vector<4xi32>
// CHECK-COUNT-2: vector.bitcast %{{.*}} : vector<4xi32> to vector<4xf32>
// CHECK:         %[[Y:.*]] = arith.mulf
// CHECK:         %[[NAN:.*]] = arith.cmpf uno, %arg0, %arg0
// CHECK:         arith.select %[[NAN]], %arg0, %[[Y]]
// CHECK-NOT:     math.exp
func.func @exp(%x: vector<4xf32>) -> vector<4xf32> {
  %0 = math.exp %x : vector<4xf32>
  return %0 : vector<4xf32>
}

// -----

// Where it is only added to 1, the power of two is added to the exponent.
// CHECK-LABEL: func.func @logistic(
// CHECK:         %[[T:.*]] = vector.fma %{{.*}}, %{{.*}}, %[[ROUNDS:.*]] : vector<4xf32>
// CHECK:         %[[N:.*]] = arith.subf %[[T]], %[[ROUNDS]]
// CHECK:         vector.fma %[[N]]
// CHECK:         %[[BITS:.*]] = vector.bitcast %[[T]] : vector<4xf32> to vector<4xi32>
// CHECK:         %[[POWER:.*]] = arith.shli %[[BITS]]
// CHECK:         arith.addi %{{.*}}, %[[POWER]]
// CHECK:         %[[ABOVE:.*]] = arith.cmpf ugt, %arg0
// CHECK:         %[[INFINITE:.*]] = arith.mulf %arg0
// CHECK:         arith.select %[[ABOVE]], %[[INFINITE]]
// CHECK-NOT:     math.exp
func.func @logistic(%x: vector<4xf32>) -> vector<4xf32> {
  %number = arith.constant 1.0 : f32
  %one = vector.broadcast %number : f32 to vector<4xf32>
  %0 = math.exp %x : vector<4xf32>
  %1 = arith.addf %0, %one : vector<4xf32>
  %2 = arith.divf %one, %1 : vector<4xf32>
  return %2 : vector<4xf32>
}

// -----

// x P(x^2) / Q(x^2), with x clamped to where the function is 1; NaN stays.
// CHECK-LABEL: func.func @erf(
// CHECK-DAG:     %[[LOW:.*]] = arith.constant dense<-4.000000e+00>
// CHECK-DAG:     %[[HIGH:.*]] = arith.constant dense<4.000000e+00>
// CHECK:         %[[ABOVE:.*]] = arith.cmpf olt, %[[HIGH]], %arg0
// CHECK:         %[[M:.*]] = arith.select %[[ABOVE]], %[[HIGH]], %arg0
// CHECK:         %[[BELOW:.*]] = arith.cmpf ogt, %[[LOW]], %[[M]]
// CHECK:         %[[X:.*]] = arith.select %[[BELOW]], %[[LOW]], %[[M]]
// CHECK:         arith.mulf %[[X]], %[[X]]
// CHECK-COUNT-6: vector.fma
// CHECK:         arith.mulf %[[X]]
// CHECK-COUNT-4: vector.fma
// CHECK:         arith.divf
// CHECK-NOT:     math.erf
func.func @erf(%x: vector<4xf32>) -> vector<4xf32> {
  %0 = math.erf %x : vector<4xf32>
  return %0 : vector<4xf32>
}

// -----

// tanh is of the same form.
// CHECK-LABEL: func.func @tanh(
// CHECK:         arith.constant dense<-7.99881172>
// CHECK:         arith.divf
// CHECK-NOT:     math.tanh
func.func @tanh(%x: vector<4xf32>) -> vector<4xf32> {
  %0 = math.tanh %x : vector<4xf32>
  return %0 : vector<4xf32>
}

// -----

// Scalars, other types and other functions stay.
// CHECK-LABEL: func.func @others(
// CHECK:         math.exp %{{.*}} : f32
// CHECK:         math.tanh %{{.*}} : vector<2xf64>
// CHECK:         math.log %{{.*}} : vector<4xf32>
func.func @others(%s: f32, %d: vector<2xf64>, %v: vector<4xf32>) -> (f32, vector<2xf64>, vector<4xf32>) {
  %0 = math.exp %s : f32
  %1 = math.tanh %d : vector<2xf64>
  %2 = math.log %v : vector<4xf32>
  return %0, %1, %2 : f32, vector<2xf64>, vector<4xf32>
}

// -----

// Where it is only added to 1, registers of 512 bits hold the polynomials of 32 pieces, which |x| rounded to eighths picks.
// CHECK-LABEL: func.func @normal(
// CHECK:         %[[SIZE:.*]] = math.absf %arg0
// CHECK:         %[[CLAMPED:.*]] = arith.select %{{.*}}, %{{.*}}, %[[SIZE]]
// CHECK:         %[[ROUNDED:.*]] = arith.addf %[[CLAMPED]]
// CHECK:         %[[PIECE:.*]] = vector.bitcast %[[ROUNDED]] : vector<16xf32> to vector<16xi32>
// CHECK:         %[[R:.*]] = arith.subf %[[CLAMPED]]
// CHECK-COUNT-5: llvm.call_intrinsic "llvm.x86.avx512.vpermi2var.ps.512"(%{{.*}}, %[[PIECE]], %{{.*}})
// CHECK-COUNT-4: vector.fma %{{.*}}, %[[R]]
// CHECK:         math.copysign
// CHECK-NOT:     math.erf
func.func @normal(%x: vector<16xf32>) -> vector<16xf32> {
  %one = arith.constant dense<1.0> : vector<16xf32>
  %0 = math.erf %x : vector<16xf32>
  %1 = arith.addf %0, %one : vector<16xf32>
  return %1 : vector<16xf32>
}
